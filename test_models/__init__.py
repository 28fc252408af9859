"""Builders of real architectures, used by the tests, the benchmarks and the demo."""

from test_models.chain import Chain
from test_models.densenet import DenseNet
from test_models.gpt import GPT
from test_models.inception import Inception
from test_models.lstm import LSTM
from test_models.mobilenet import MobileNet
from test_models.model import Model, V1Step, build_v1, build_v2
from test_models.pixelcnn import PixelCNN
from test_models.resnet import CifarResNet, ResNet50
from test_models.segnet import SegNet
from test_models.transformer import Transformer
from test_models.unet import UNet
from test_models.vgg import VGG16

__all__ = [
    "GPT",
    "LSTM",
    "VGG16",
    "Chain",
    "CifarResNet",
    "DenseNet",
    "Inception",
    "MobileNet",
    "Model",
    "PixelCNN",
    "ResNet50",
    "SegNet",
    "Transformer",
    "UNet",
    "V1Step",
    "build_v1",
    "build_v2",
]
