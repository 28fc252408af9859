"""Builders of real architectures, used by the tests, the benchmarks and the demo."""

from test_models.chain import Chain
from test_models.densenet import DenseNet
from test_models.gpt import GPT
from test_models.model import Model, V1Step, build_v1, build_v2
from test_models.resnet import CifarResNet, ResNet50
from test_models.unet import UNet

__all__ = [
    "GPT",
    "Chain",
    "CifarResNet",
    "DenseNet",
    "Model",
    "ResNet50",
    "UNet",
    "V1Step",
    "build_v1",
    "build_v2",
]
