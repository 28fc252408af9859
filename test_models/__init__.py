"""Builders of real architectures, used by the tests, the benchmarks and the demo."""

from test_models.bert import BERT
from test_models.bifpn import BiFPN
from test_models.chain import Chain
from test_models.densenet import DenseNet, DenseNet121
from test_models.dtypes import FourierNet, MixedPrecision
from test_models.features import RaggedSparse, TextClassifier
from test_models.gan import WGANGP, CycleGAN
from test_models.glow import Glow
from test_models.gpt import GPT, CollectingGPT
from test_models.inception import Inception
from test_models.lstm import LSTM
from test_models.maml import MAML
from test_models.mobilenet import MobileNet
from test_models.model import Model, V1Step, build_v1, build_v2
from test_models.moe import MixtureOfExperts
from test_models.pixelcnn import PixelCNN
from test_models.recurrent import DynamicRNN, KerasRNN
from test_models.resnet import CifarResNet, ResNet50, ResNet101
from test_models.rollout import Rollout
from test_models.segnet import SegNet
from test_models.style import StyleTransfer
from test_models.towers import Towers
from test_models.transformer import Transformer
from test_models.unet import UNet, UNet3D
from test_models.vgg import VGG16
from test_models.vit import ViT

__all__ = [
    "BERT",
    "GPT",
    "LSTM",
    "MAML",
    "VGG16",
    "WGANGP",
    "BiFPN",
    "Chain",
    "CifarResNet",
    "CollectingGPT",
    "CycleGAN",
    "DenseNet",
    "DenseNet121",
    "DynamicRNN",
    "FourierNet",
    "Glow",
    "Inception",
    "KerasRNN",
    "MixedPrecision",
    "MixtureOfExperts",
    "MobileNet",
    "Model",
    "PixelCNN",
    "RaggedSparse",
    "ResNet50",
    "ResNet101",
    "Rollout",
    "SegNet",
    "StyleTransfer",
    "TextClassifier",
    "Towers",
    "Transformer",
    "UNet",
    "UNet3D",
    "V1Step",
    "ViT",
    "build_v1",
    "build_v2",
]
