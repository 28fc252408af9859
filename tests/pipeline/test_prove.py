"""`verify=True`: the plan is held against a real run before the user's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients import BudgetError, get_plans, gradients
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.pipeline import prove
from test_models import Chain, CifarResNet, build_v1
from tests.cases import assert_same

v1 = tf.compat.v1


@pytest.mark.parametrize("batch", [32, None])
def test_the_plan_says_what_a_run_took(graph, batch):
    model = CifarResNet(20)
    step = build_v1(model, batch)
    gradients(step.loss, step.variables, memory_budget=0.6, batch_size=32, verify=True)
    (plan,) = get_plans()
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert f"measured {plan.measured_peak_bytes / 1e6:.1f} MB" in str(plan)
    assert plan.batch_size == (None if batch else 32)


def test_a_missed_budget_is_planned_again(graph, monkeypatch):
    def heavier(*args):
        calls.append(real(*args))
        return int(1.2 * calls[-1])

    calls, real = [], prove.session_peak
    monkeypatch.setattr(prove, "session_peak", heavier)
    model = Chain(24, width=64)
    step = build_v1(model, 1024)
    ours = gradients(step.loss, step.variables, memory_budget=0.5, verify=True)
    (plan,) = get_plans()
    assert len(calls) == 2
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes < 0.85 * plan.budget_bytes
    count = len(graph.get_operations())
    with tf.Graph().as_default() as other:
        once = build_v1(Chain(24, width=64), 1024)
        gradients(once.loss, once.variables, plan=plan)
    assert count == len(other.get_operations())  # the given up plan has left none
    plain = tf.gradients(step.loss, step.variables)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        assert_same(*session.run([ours, plain], step.feed(model.example(1024))))


def test_a_budget_that_no_run_keeps_leaves_the_graph_plain(graph, monkeypatch):
    monkeypatch.setattr(prove, "session_peak", lambda *args: 10**9)
    step = build_v1(Chain(24, width=64), 1024)
    with pytest.raises(
        BudgetError, match=r"kept by no run .* measured peak is 1000.0 MB"
    ) as caught:
        gradients(step.loss, step.variables, memory_budget=0.5, verify=True)
    assert caught.value.lowest_peak_bytes == 10**9
    assert not get_plans()
    for op in graph.get_operations():
        read = [t.op.name for t in op.inputs] + [before.name for before in op.control_inputs]
        assert "recomputed" in op.name or not any("recomputed" in name for name in read)


def process_takes(monkeypatch, *peaks):
    """Has the process grow by so many bytes in the measured steps, one after the other."""
    left = [*peaks]
    monkeypatch.setattr(tf_private, "onednn_enabled", lambda: True)
    monkeypatch.setattr(prove, "step_peak", lambda step: left.pop(0))


def test_what_the_process_takes_is_held_against_the_budget(graph, monkeypatch):
    process_takes(monkeypatch, 18 * 10**6, 5 * 10**6)
    step = build_v1(Chain(24, width=64), 1024)
    gradients(step.loss, step.variables, memory_budget="9MB", verify=True)
    (plan,) = get_plans()
    assert plan.peak_bytes < 5 * 10**6
    assert plan.process_peak_bytes is None
    assert "of the process" not in str(plan)


def test_where_allocator_and_process_disagree_both_are_said(graph, monkeypatch):
    process_takes(monkeypatch, 3 * 10**7, *[4 * 10**7] * 3)
    step = build_v1(Chain(24, width=64), 1024)
    gradients(step.loss, step.variables, checkpoints="memory", verify=True)
    (plan,) = get_plans()
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
    assert plan.process_peak_bytes == 3 * 10**7
    assert "(30.0 MB of the process)" in str(plan)
    with pytest.raises(
        BudgetError, match=r"peak is 40.0 MB. That is the growth of the process; .* asked for \d"
    ):
        gradients(step.loss, step.variables, memory_budget="5MB", verify=True)


def test_where_the_system_tells_nothing_the_allocator_counts(graph, monkeypatch):
    def fail(step):
        raise OSError("no /proc")

    monkeypatch.setattr(tf_private, "onednn_enabled", lambda: True)
    monkeypatch.setattr(prove, "step_peak", fail)
    step = build_v1(Chain(24, width=64), 1024)
    gradients(step.loss, step.variables, memory_budget=0.5, verify=True)
    (plan,) = get_plans()
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.process_peak_bytes is None


def test_fit():
    model = keras.Sequential([keras.layers.Dense(128, "tanh") for _ in range(12)])
    model.compile("adam", "mse")
    msg.keras.save_memory(model, verify=True)
    x = np.zeros((512, 128), "float32")
    model.fit(x, x, batch_size=256, verbose=0)
    assert msg.keras.get_plans(model)[0].measured_peak_bytes


def rehearsed_as(monkeypatch, *added):
    """Has rehearsals find so many bytes more than planned, one after the other; then none."""
    left = [*added]
    monkeypatch.setattr(prove, "added_bytes", lambda *_: left.pop(0) if left else 0)


def test_a_rehearsal_that_holds_more_is_planned_again(graph, monkeypatch):
    rehearsed_as(monkeypatch, 10**6)
    step = build_v1(Chain(24, width=64), 1024)
    gradients(step.loss, step.variables, memory_budget=0.5)
    (plan,) = get_plans()
    assert plan.peak_bytes < 0.9 * plan.budget_bytes


def test_where_grappler_fails_nothing_is_rehearsed(graph, monkeypatch):
    def fail(*_, **__):
        raise tf.errors.InvalidArgumentError(None, None, "no")

    monkeypatch.setattr(tf_private, "optimized", fail)
    step = build_v1(Chain(24, width=64), 1024)
    gradients(step.loss, step.variables, memory_budget=0.5)
    assert get_plans()[0].recomputed


def test_where_no_rehearsal_keeps_the_budget_a_warning_says_so(graph, monkeypatch):
    rehearsed_as(monkeypatch, *[10**9] * 5)
    step = build_v1(Chain(24, width=64), 1024)
    with pytest.warns(UserWarning, match=r"may take 10\d\d\.\d MB where .* verify=True"):
        gradients(step.loss, step.variables, memory_budget=0.5)
    (plan,) = get_plans()
    assert plan.recomputed
    assert plan.peak_bytes <= plan.budget_bytes
