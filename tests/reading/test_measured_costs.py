"""Measured costs against runs whose cost is known."""

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.measured_costs import measure_ops
from test_models import build_v1, build_v2
from tests.cases import MODELS


def measure(*results):
    operations = results[0].graph.get_operations()
    step = BackwardPass.since(len(operations), results[0], results)
    return measure_ops(step, operations, Shapes(operations))


def test_every_op_that_runs_is_timed(graph):
    x = tf.compat.v1.placeholder(tf.float32, (None, 512))
    v = tf.Variable(tf.zeros((512, 512)))
    product = tf.matmul(x, v, name="product")
    found = measure(tf.reduce_sum(tf.nn.relu(product, name="relu"), name="sum"))
    assert {"product", "relu", "sum"} <= found.keys()
    assert all(entry.seconds for entry in found.values())


def test_scratch_space_is_what_is_given_back_when_the_op_ends(graph):
    x = tf.compat.v1.placeholder(tf.float32, (16, 32, 32, 8))
    y = tf.nn.max_pool2d(x, 2, 2, "SAME")
    (gradient,) = tf.gradients(y, x)
    # The positions of the maxima, 8 bytes each; the maxima are written over the pooled values.
    expected = 16 * 16 * 16 * 8 * 8
    assert measure(gradient)[gradient.op.name].workspace == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["resnet20", "gpt with dropout"])
def test_models_are_planned_by_measured_costs(graph, name):
    make, batch = MODELS[name]
    step = build_v1(make(), batch)
    gradients(step.loss, step.variables, memory_budget=0.7, cost_model="measured")
    plan = get_plans()[-1]
    assert plan.peak_bytes <= plan.budget_bytes
    assert np.isfinite(plan.overhead)


def test_functions_are_planned_by_measured_costs():
    make, batch = MODELS["chain"]
    model = make()
    step = build_v2(
        model, lambda y, x: gradients(y, x, memory_budget=0.5, cost_model="measured"), batch
    )
    step(*[tf.constant(a) for a in model.example(batch)])
    assert get_plans(step.get_concrete_function().graph)[-1].recomputed


def test_a_step_that_cannot_be_run_is_an_error_and_stays_plain(graph):
    x = tf.compat.v1.placeholder(tf.float32, (64, 64))
    checked = tf.debugging.assert_greater(tf.reduce_sum(x), 1e9)
    with tf.control_dependencies([checked]):
        y = tf.tanh(tf.tanh(tf.tanh(x)))
    with pytest.raises(RuntimeError, match="analytical"):
        gradients(y, x, checkpoints="memory", cost_model="measured")
    assert not [op for op in graph.get_operations() if op.name.startswith("recompute")]


def test_an_unknown_cost_model_is_refused(graph):
    x = tf.compat.v1.placeholder(tf.float32, (64, 64))
    with pytest.raises(ValueError, match="cost_model"):
        gradients(tf.tanh(x), x, checkpoints="memory", cost_model="guessed")
