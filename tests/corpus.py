"""The hard graphs, at the size that tests run them, and what each is tested for."""

from test_models import (
    BERT,
    GPT,
    LSTM,
    MAML,
    WGANGP,
    BiFPN,
    CifarResNet,
    CollectingGPT,
    CycleGAN,
    DenseNet121,
    DynamicRNN,
    FourierNet,
    Glow,
    Inception,
    KerasRNN,
    MixedPrecision,
    MixtureOfExperts,
    PixelCNN,
    RaggedSparse,
    ResNet101,
    Rollout,
    StyleTransfer,
    TextClassifier,
    Towers,
    Transformer,
    UNet,
    UNet3D,
)

small_gpt = {"layers": 3, "width": 64, "length": 64, "vocabulary": 128, "heads": 2}

#: name: (builder, batch)
CORPUS = {
    "U-Net, dropout and batch norm": (lambda: UNet(64, width=8, levels=2, dropout=0.2), 16),
    "3-D U-Net, dropout and batch norm": (lambda: UNet3D(16, width=4, levels=2, dropout=0.2), 4),
    "DenseNet-121": (lambda: DenseNet121(64, classes=10, growth=8), 8),
    "BiFPN, squeeze-excite, swish": (BiFPN, 4),
    "Inception": (lambda: Inception(size=64, classes=10, shrink=4), 8),
    "PixelCNN++": (lambda: PixelCNN(size=16, width=16, blocks=1), 8),
    "Glow": (Glow, 32),
    "CycleGAN": (CycleGAN, 16),
    "ResNet-101, auxiliary loss": (lambda: ResNet101(64, classes=10, width=8), 16),
    "GPT, tied embedding": (lambda: GPT(**small_gpt), 8),
    "GPT, all layers collected": (lambda: CollectingGPT(**small_gpt), 8),
    "Transformer, cross attention": (
        lambda: Transformer(layers=2, width=64, length=64, vocabulary=128),
        8,
    ),
    "BERT, while-loop head": (BERT, 8),
    "mixture of experts": (MixtureOfExperts, 32),
    "WGAN-GP": (WGANGP, 32),
    "MAML": (MAML, 512),
    "unrolled LSTM": (lambda: LSTM(length=12, width=32, vocabulary=64), 64),
    "dynamic_rnn": (DynamicRNN, 64),
    "Keras LSTM": (lambda: KerasRNN("lstm"), 64),
    "bidirectional GRU, recurrent dropout": (lambda: KerasRNN("gru"), 64),
    "rollout": (Rollout, 128),
    "style transfer": (lambda: StyleTransfer(192, width=16), 1),
    "mixed float16": (MixedPrecision, 8),
    "complex FFT layers": (FourierNet, 16),
    "sparse and ragged": (RaggedSparse, 512),
    "strings and lookup": (TextClassifier, 512),
    "1,000-layer ResNet": (lambda: CifarResNet(1004, size=8, width=4), 16),
    "200 parallel towers": (Towers, 256),
}

#: Too large for the ordinary run.
LARGE = (
    "DenseNet-121",
    "ResNet-101, auxiliary loss",
    "1,000-layer ResNet",
    "200 parallel towers",
)
