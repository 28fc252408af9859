"""A training step around something that somebody else wrote, plain and with ours."""

import contextlib
import os
import random
import warnings

import keras
import numpy as np
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape
from memory_saving_gradients.pipeline import plan_and_rewrite
from memory_saving_gradients.planning import strategies
from memory_saving_gradients.planning.keep import keeping

#: What is asked for: "all again" runs every op twice that may, whether that saves memory or not.
WAYS = {
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "half": {"memory_budget": 0.5},
    "all again": {"checkpoints": "memory"},
}


def todays(names, count):
    """So many of the names, others every day; all of them with --slow."""
    return sorted(
        random.Random(int(os.environ["TEST_DAY"])).sample(sorted(names), min(count, len(names)))
    )


@contextlib.contextmanager
def asked_for(way, monkeypatch):
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "memory_saving_gradients")
        if way == "all again":
            patch.setitem(strategies.STRATEGIES, "memory", lambda problem, _: keeping(problem, ()))
            patch.setattr(plan_and_rewrite, "is_worth_it", lambda *_: True)
        yield


def floats(structure):
    """The tensors of a structure that gradients flow through, as float32."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    leaves = [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]
    leaves = [tf.math.real(leaf) if leaf.dtype.is_complex else leaf for leaf in leaves]
    return [tf.cast(leaf, tf.float32) for leaf in leaves if leaf.dtype.is_floating]


def loss_of(outputs):
    """A loss that normalisation at the end does not make constant."""
    outputs = floats(outputs)
    weights = [tf.random.stateless_normal(tf.shape(y), (1, 2)) for y in outputs]
    return tf.add_n([tf.reduce_mean(w * tf.sin(y)) for w, y in zip(weights, outputs, strict=True)])


def gradients_of(forward, inputs, variables, way=None, eager=False):
    """The loss and gradients of one step, and the state that it leaves.

    Args:
        forward: from tensors to outputs, called within the tape.
        inputs: arrays.
        variables: all variables of it.
        way: a key of WAYS; None for TensorFlow's own tape.
        eager: whether the step is no `tf.function`.
    """
    before = [tf.identity(v) for v in variables]
    keras.utils.set_random_seed(7)
    trained = [v for v in variables if v.trainable]

    def step(*tensors):
        with GradientTape(persistent=False, **WAYS[way]) if way else tf.GradientTape() as tape:
            watched = [t for t in tensors if t.dtype.is_floating]
            tape.watch(watched)
            loss = loss_of(forward(*tensors))
        grads = tape.gradient(loss, [*watched, *trained])
        return [loss, *(tf.convert_to_tensor(grad) for grad in grads if grad is not None)]

    function = tf.function(step, autograph=False)
    tensors = [tf.constant(x) for x in inputs]
    try:
        run = step if eager else function.get_concrete_function(*tensors)
        values = [value.numpy() for value in run(*tensors)]
        state = [v.numpy() for v in variables]
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    return [*values, *state]


@contextlib.contextmanager
def without_grappler():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def compare(*step):
    """Asserts that ours gives what plain gives.

    Where Grappler finds another form of a sum of products (README's limits), that is to rounding,
    and to the bit without it.
    """
    ours, plain = both(*step)
    if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, plain, strict=True)):
        for a, b in zip(ours, plain, strict=True):
            # A gradient of nothing but rounding (a key's bias, under a softmax) counts as zero.
            largest = np.abs(np.asarray(b, np.float64)).max(initial=1e-5)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest)
        with without_grappler():
            for a, b in zip(*both(*step), strict=True):
                np.testing.assert_array_equal(a, b)


def both(forward, inputs, variables, way, monkeypatch):
    """The results of a step with ours and as it is."""
    plain = gradients_of(forward, inputs, variables)
    with asked_for(way, monkeypatch):
        try:
            ours = gradients_of(forward, inputs, variables, way)
        except BudgetError as error:
            with monkeypatch.context() as patch:
                patch.setitem(WAYS, way, {"memory_budget": f"{error.lowest_peak_bytes}B"})
                ours = gradients_of(forward, inputs, variables, way)
    return ours, plain
