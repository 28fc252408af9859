"""Gradients equal those of `tf.gradients` bit for bit: every strategy on every model."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from test_models import build_v2
from tests.cases import MODELS, OPTIONS, assert_same, options_for, run_session


@functools.cache
def plain_session(name, static=True):
    return run_session(*MODELS[name], tf.gradients, static)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(11)
def test_session_gradients_are_equal(name, how):
    make, batch = MODELS[name]
    plain = plain_session(name)
    options = options_for(name, how)
    options["running_sums"] = name != "lstm"  # added as they come, they are equal to rounding
    ours = run_session(make, batch, lambda ys, xs: gradients(ys, xs, **options))
    assert_same(ours.values, plain.values)
    assert_same(ours.moving, plain.moving)  # batch-norm averages were updated once
    assert ours.plan, "nothing was recomputed, so the test shows nothing"
    assert ours.plan.peak_bytes < ours.plan.baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["resnet20", "gpt with dropout"])
def test_unknown_batch_is_planned_and_equal(name):
    make, batch = MODELS[name]
    plain = plain_session(name, static=False)
    ours = run_session(
        make, batch, lambda ys, xs: gradients(ys, xs, checkpoints="memory"), static=False
    )
    assert_same(ours.values, plain.values)
    assert ours.plan.peak_bytes < 0.8 * ours.plan.baseline_peak_bytes


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
@pytest.mark.sweep(9)
def test_function_gradients_are_equal(name, how):
    plain = plain_function(name)
    options = {"checkpoints": how, "running_sums": name != "lstm"}
    ours, plans = run_function(name, lambda y, x: gradients(y, x, **options), static=True)
    assert plans
    assert_same(ours, plain)


@pytest.mark.usefixtures("deterministic", "no_constant_folding")
@pytest.mark.parametrize("name", ["chain", "resnet20", "unet", "densenet", "gpt with dropout"])
@pytest.mark.sweep(2)
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
