"""The test models at the size that tests run them, every way of choosing checkpoints, and runs."""

import contextlib
import dataclasses
import functools

import numpy as np
import tensorflow as tf

from memory_saving_gradients import Plan, get_plans, gradients_memory
from memory_saving_gradients.measure import session_peak
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
    ViT,
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
    "vit": (lambda: ViT(size=32, patch=4, layers=3, width=64, heads=2, classes=10), 16),
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
    "overhead": {"max_overhead": 0.1},
    "auto": {"checkpoints": "auto"},
    "articulation": {"checkpoints": "articulation"},
}


def options_for(name: str, how: str) -> dict:
    """`OPTIONS[how]` for the model of that name.

    A share in `memory_budget` is that of the way from the peak of `memory` to the baseline: scratch
    space makes a large part of the peak of small models.
    """
    options = dict(OPTIONS[how])
    if "memory_budget" in options:
        lowest, baseline = _peaks(name)
        between = int(lowest + options["memory_budget"] * (baseline - lowest))
        options["memory_budget"] = f"{between}B"
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


@dataclasses.dataclass(frozen=True)
class Run:
    """One step in a session: the loss and its gradients, what it left in variables, its plan."""

    values: list
    moving: list
    peak: int
    plan: Plan | None


@contextlib.contextmanager
def initialised(threads):
    """A session of so many inter-op threads, with its variables and tables."""
    v1 = tf.compat.v1
    config = v1.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=True)
    with v1.Session(config=config) as session:
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        yield session


def run_session(make, batch, differentiate, static=True, measured=False) -> Run:
    """Builds a model, differentiates it with `differentiate(ys, xs)`, and runs one step.

    One inter-op thread computes the same bits each time. The peak, if it is `measured`, is that of
    a session with two, as users have more.
    """
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(7)
        model = make()
        step = build_v1(model, batch if static else None)
        fetches = [step.loss, *differentiate(step.loss, step.variables)]
        feed = step.feed(model.example(batch))
        with initialised(threads=1) as session:
            values, _ = session.run((fetches, v1.group(*step.updates)), feed)
            moving = session.run(model.moving)
        peak = 0
        if measured:
            with initialised(threads=2) as session:
                fetched = tf.nest.flatten(fetches, expand_composites=True)
                session.run(fetched, feed)
                peak = session_peak(session, fetched, feed)
        plans = get_plans(graph)
    return Run(values, moving, peak, plans[-1] if plans else None)


def assert_same(ours, plain):
    """The same types, and the same values bit for bit."""
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert type(one) is type(other)
        pairs = (tf.nest.flatten(value, expand_composites=True) for value in (one, other))
        for a, b in zip(*pairs, strict=True):
            np.testing.assert_array_equal(a, b)
