"""Gradients equal those of `tf.gradients` bit for bit: every strategy on every model."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from test_models import build_v1, build_v2
from tests.cases import CHECKPOINTS, MODELS

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


def assert_same(ours, plain):
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert type(one) is type(other)
        for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("name", MODELS)
def test_session_gradients_are_equal(name, how):
    make, batch = MODELS[name]
    plain, plain_moving, _ = run_session(make, batch, tf.gradients)
    ours, moving, plans = run_session(
        make, batch, lambda ys, xs: gradients(ys, xs, checkpoints=CHECKPOINTS[how])
    )
    assert_same(ours, plain)
    assert_same(moving, plain_moving)  # batch-norm averages were updated once
    assert plans, "nothing was recomputed, so the test shows nothing"
    assert plans[-1].recomputed


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["resnet20", "gpt with dropout"])
def test_unknown_batch_is_planned_and_equal(name):
    make, batch = MODELS[name]
    plain, _, _ = run_session(make, batch, tf.gradients, static=False)
    ours, _, plans = run_session(
        make, batch, lambda ys, xs: gradients(ys, xs, checkpoints="memory"), static=False
    )
    assert_same(ours, plain)
    assert plans[-1].peak_bytes < 0.8 * plans[-1].baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("how", ["memory", "speed"])
@pytest.mark.parametrize("name", MODELS)
def test_function_gradients_are_equal(name, how, static):
    make, batch = MODELS[name]

    def run(differentiate):
        tf.random.set_seed(3)
        model = make()
        step = build_v2(model, differentiate, batch if static else None)
        inputs = [tf.constant(a) for a in model.example(batch)]
        return step(*inputs), get_plans(step.get_concrete_function().graph)

    (loss, plain), _ = run(tf.gradients)
    (our_loss, ours), plans = run(lambda ys, xs: gradients(ys, xs, checkpoints=how))
    assert plans
    assert_same([our_loss, *ours], [loss, *plain])
