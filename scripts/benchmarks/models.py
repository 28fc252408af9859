"""Every test model with `tf.gradients`, every strategy and budgets, in a default session.

That is: oneDNN as installed, all threads. And the time that rewriting a model takes. On 2 cores it
takes about 25 minutes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from memory_saving_gradients import (
    GradientTape,
    get_plans,
    gradients,
    gradients_memory,
    gradients_speed,
)
from scripts.benchmarks.common import Section, in_session, measure_ways
from test_models import (
    GPT,
    LSTM,
    VGG16,
    Chain,
    CifarResNet,
    DenseNet,
    Inception,
    MobileNet,
    Model,
    PixelCNN,
    ResNet50,
    SegNet,
    Transformer,
    UNet,
    build_v1,
)

METHODS: dict[str, Callable[..., list]] = {
    "tf.gradients": tf.gradients,
    "memory": gradients_memory,
    "speed": gradients_speed,
}

#: label: (builder, batch)
MODELS: dict[str, tuple[Callable[[], Model], int]] = {
    "chain, 64 layers, 2048 × 256": (Chain, 2048),
    "ResNet-56, CIFAR, batch 128": (functools.partial(CifarResNet, 56), 128),
    "ResNet-110, CIFAR, batch 128": (functools.partial(CifarResNet, 110), 128),
    "ResNet-50, 96 px, batch 32": (ResNet50, 32),
    "U-Net, 128 px, batch 4": (UNet, 4),
    "DenseNet, 2 × 12 layers, batch 64": (DenseNet, 64),
    "GPT, 6 layers, batch 8": (GPT, 8),
    "VGG16, half width, 128 px, batch 16": (functools.partial(VGG16, 128, width=32), 16),
    "MobileNet, 128 px, batch 32": (functools.partial(MobileNet, 128), 32),
    "ResNet-50, 224 px, batch 8": (functools.partial(ResNet50, 224), 8),
    "Inception, 128 px, batch 32": (functools.partial(Inception, 128), 32),
    "SegNet, 64 px, batch 16": (SegNet, 16),
    "PixelCNN++, batch 8": (PixelCNN, 8),
    "LSTM, 2 × 96 cells, batch 64": (LSTM, 64),
    "Transformer, 4 + 4 layers, batch 32": (Transformer, 32),
}


#: The budgets, as shares of the baseline peak.
SHARES = (0.7, 0.5, 0.3, 0.2)


def measured(label: str) -> dict[str, dict]:
    """Peak, prediction and time of all strategies and budgets on one model."""
    budgets = {f"budget {s:g}": functools.partial(gradients, memory_budget=s) for s in SHARES}
    return measure_ways(
        {
            way: functools.partial(in_session, *MODELS[label], differentiate)
            for way, differentiate in (METHODS | budgets).items()
        }
    )


#: What the rewriting is timed on, beside a model of Keras.
REWRITTEN: dict[str, tuple[Callable[[], Model], int]] = {
    **{
        f"chain, {layers:,} layers": (functools.partial(Chain, layers, width=16), 256)
        for layers in (52, 526, 1052)
    },
    **{label: MODELS[label] for label in MODELS if label.startswith(("ResNet-56", "ResNet-110"))},
    "GPT, 6 layers, batch 8": (GPT, 8),
}


def rewriting_time(label: str) -> dict[str, float]:
    """Seconds that `tf.gradients` takes on a model, and those that its rewriting adds."""
    _rewriting_time(Chain, 256)  # warms up
    return _rewriting_time(*REWRITTEN[label]) if label in REWRITTEN else _keras_rewriting_time()


def _rewriting_time(make: Callable[[], Model], batch: int) -> dict[str, float]:
    with tf.Graph().as_default() as graph:
        step = build_v1(make(), batch)
        ops = len(graph.get_operations())
        began = time.perf_counter()
        tf.gradients(step.loss, step.variables)
        plain = time.perf_counter() - began
        gradients_memory(step.loss, step.variables)
        return {"ops": ops, "tf_gradients": plain, "ours": get_plans(graph)[-1].seconds}


def _keras_rewriting_time() -> dict[str, float]:
    """The same with the tape, for EfficientNetV2-B0 of Keras."""
    model = keras.applications.EfficientNetV2B0(weights=None, input_shape=(96, 96, 3))
    taken: dict[str, float] = {}

    @tf.function(autograph=False)
    def step(images: tf.Tensor) -> list:
        with tf.GradientTape() as plain, GradientTape() as ours:
            loss = tf.reduce_mean(model(images, training=True))
        taken["ops"] = len(loss.graph.get_operations())
        began = time.perf_counter()
        plain.gradient(loss, model.trainable_variables)
        taken["tf_gradients"] = time.perf_counter() - began
        return ours.gradient(loss, model.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec((16, 96, 96, 3))).graph
    return taken | {"ours": get_plans(graph)[-1].seconds}


SECTIONS = {
    "models": Section(MODELS, measured),
    "rewriting": Section([*REWRITTEN, "EfficientNetV2-B0 of Keras"], rewriting_time),
}
