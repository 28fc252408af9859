"""Gradients equal those of `tf.gradients` bit for bit: every strategy on every model."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from test_models import build_v1, build_v2
from tests.cases import MODELS, OPTIONS, options_for

v1 = tf.compat.v1


def run_session(make, batch, differentiate, static=True):
    model = make()
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(7)
        step = build_v1(model, batch if static else None)
        fetches = [step.loss, *differentiate(step.loss, step.variables)]
        updates = v1.group(*step.updates)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            values, _ = session.run((fetches, updates), step.feed(model.example(batch)))
            moving = session.run(model.moving)
    return values, moving, get_plans(graph)


@functools.cache
def plain_session(name, static=True):
    return run_session(*MODELS[name], tf.gradients, static)


def assert_same(ours, plain):
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert type(one) is type(other)
        pairs = (tf.nest.flatten(value, expand_composites=True) for value in (one, other))
        for a, b in zip(*pairs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_session_gradients_are_equal(name, how):
    make, batch = MODELS[name]
    plain, plain_moving, _ = plain_session(name)
    options = options_for(name, how)
    ours, moving, plans = run_session(make, batch, lambda ys, xs: gradients(ys, xs, **options))
    assert_same(ours, plain)
    assert_same(moving, plain_moving)  # batch-norm averages were updated once
    assert plans, "nothing was recomputed, so the test shows nothing"
    assert plans[-1].peak_bytes < plans[-1].baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["resnet20", "gpt with dropout"])
def test_unknown_batch_is_planned_and_equal(name):
    make, batch = MODELS[name]
    plain, _, _ = plain_session(name, static=False)
    ours, _, plans = run_session(
        make, batch, lambda ys, xs: gradients(ys, xs, checkpoints="memory"), static=False
    )
    assert_same(ours, plain)
    assert plans[-1].peak_bytes < 0.8 * plans[-1].baseline_peak_bytes


@pytest.fixture
def no_constant_folding():
    """Grappler without the pass that reassociates products with constants.

    With unknown shapes it decides by who reads a product, so it treats a rewritten graph otherwise.
    """
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    yield
    tf.config.optimizer.set_experimental_options({"constant_folding": True})


@functools.cache
def plain_function(name):
    return run_function(name, tf.gradients, static=True)[0]


def run_function(name, differentiate, static):
    make, batch = MODELS[name]
    tf.random.set_seed(3)
    model = make()
    step = build_v2(model, differentiate, batch if static else None)
    inputs = [tf.constant(a) for a in model.example(batch)]
    loss, grads = step(*inputs)
    return [loss, *grads], get_plans(step.get_concrete_function().graph)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("how", ["memory", "speed"])
@pytest.mark.parametrize("name", MODELS)
def test_function_gradients_are_equal(name, how):
    plain = plain_function(name)
    ours, plans = run_function(name, lambda y, x: gradients(y, x, checkpoints=how), static=True)
    assert plans
    assert_same(ours, plain)


@pytest.mark.usefixtures("deterministic", "no_constant_folding")
@pytest.mark.parametrize("name", ["chain", "resnet20", "unet", "densenet", "gpt with dropout"])
def test_function_gradients_of_an_unknown_batch_are_equal(name):
    plain, _ = run_function(name, tf.gradients, static=False)
    ours, plans = run_function(
        name, lambda y, x: gradients(y, x, checkpoints="memory"), static=False
    )
    assert plans
    assert_same(ours, plain)


@pytest.mark.usefixtures("deterministic")
def test_constant_folding_changes_no_more_than_rounding():
    plain, _ = run_function("gpt", tf.gradients, static=False)
    ours, _ = run_function("gpt", lambda y, x: gradients(y, x, checkpoints="memory"), static=False)
    for a, b in zip(ours, plain, strict=True):
        a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)
