"""The test models at the size that tests run them, and every way of choosing checkpoints."""

import functools

import tensorflow as tf

from memory_saving_gradients import get_plans, gradients_memory
from test_models import (
    GPT,
    LSTM,
    VGG16,
    Chain,
    CifarResNet,
    DenseNet,
    Inception,
    MobileNet,
    PixelCNN,
    ResNet50,
    SegNet,
    Transformer,
    UNet,
    build_v1,
)

#: name: (builder, batch). Large enough that activations outweigh the kernels' scratch space.
MODELS = {
    "chain": (lambda: Chain(layers=16, width=64), 512),
    "resnet20": (lambda: CifarResNet(20), 32),
    "resnet50": (lambda: ResNet50(size=64, classes=10, width=16), 32),
    "unet": (lambda: UNet(size=64, width=8, levels=2), 16),
    "densenet": (lambda: DenseNet(blocks=2, layers=5, growth=12, size=32), 16),
    "gpt": (lambda: GPT(layers=3, width=64, length=64, vocabulary=128, heads=2), 8),
    "gpt with dropout": (
        lambda: GPT(layers=3, width=64, length=64, vocabulary=128, heads=2, dropout=0.1),
        8,
    ),
    "vgg": (lambda: VGG16(size=64, classes=10, width=8), 16),
    "mobilenet": (lambda: MobileNet(size=64, classes=10, width=8), 16),
    "inception": (lambda: Inception(size=64, classes=10, shrink=4), 8),
    "segnet": (lambda: SegNet(size=64, width=8), 8),
    "lstm": (lambda: LSTM(length=12, width=32, vocabulary=64), 64),
    "transformer": (lambda: Transformer(layers=2, width=64, length=64, vocabulary=128), 8),
    "pixelcnn": (lambda: PixelCNN(size=16, width=16, blocks=1), 8),
}


#: The options of `gradients` that every model is tested with.
OPTIONS: dict[str, dict] = {
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "policy": {
        "checkpoints": lambda op: op.type in ("MatMul", "Conv2D", "AddV2", "ConcatV2"),
    },
    "regular expression": {
        "checkpoints": [r"^(AddV2|add|mul|concat|Relu)(_\d*[02468])?:0$"],
    },
    "budget": {"memory_budget": 0.6},
    "tight budget": {"memory_budget": 0.05},
}


def options_for(name: str, how: str) -> dict:
    """`OPTIONS[how]` for the model of that name.

    A share in `memory_budget` is that of the way from the peak of `memory` to the baseline: scratch
    space makes a large part of the peak of small models.
    """
    options = dict(OPTIONS[how])
    if "memory_budget" in options:
        lowest, baseline = _peaks(name)
        options["memory_budget"] = int(lowest + options["memory_budget"] * (baseline - lowest))
    return options


@functools.cache
def _peaks(name: str) -> tuple[int, int]:
    """Predicted peaks of a model: that of `memory`, and the baseline."""
    make, batch = MODELS[name]
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(7)
        step = build_v1(make(), batch)
        gradients_memory(step.loss, step.variables)
        (plan,) = get_plans()
    return plan.peak_bytes, plan.baseline_peak_bytes
