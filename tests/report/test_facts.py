"""What is said of a plan agrees with the plan."""

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.planning.problem import copied
from memory_saving_gradients.planning.simulate import simulate
from memory_saving_gradients.report import facts
from tests.report.plans import CASES, plan_of

v1 = tf.compat.v1


@pytest.mark.parametrize("name", CASES)
def test_segments_are_all_that_runs_again(name):
    plan = plan_of(name)
    _, copies = copied(plan.problem, plan.schedule)
    parts = facts.segments(plan)
    assert sorted(entry for part in parts for entry in part.entries) == [
        entry for entry, copy in enumerate(copies) if copy
    ]
    extra = simulate(plan.problem, plan.schedule).cost / plan.problem.costs.sum() - 1
    assert sum(part.overhead for part in parts) == pytest.approx(extra)
    assert [part.entries[0] for part in parts] == sorted(part.entries[0] for part in parts)


def test_what_only_runs_late_is_not_said_to_run_again(graph):
    x = tf.ones((256, 32, 32))
    h = tf.while_loop(lambda i, _: i < 256, lambda i, h: (i + 1, tf.tanh(h * x[i])), (0, x[0]))[1]
    gradients(tf.reduce_sum(h**2), [x], checkpoints="memory")
    (plan,) = get_plans(graph)
    assert any(copied(plan.problem, plan.schedule)[1])
    assert not plan.recomputed
    assert not facts.segments(plan)
    shown: list[str] = []
    plan.summary(print_fn=shown.append)
    assert "Outside loops nothing runs again." in "".join(shown)


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_adds_up_to_the_peak(name):
    plan = plan_of(name)
    peak = facts.at_peak(plan)
    assert peak.bytes == plan.peak_bytes
    held = sum(part.bytes for part in peak.held)
    # An op that writes over its input holds it and its output at once, and one of them counts.
    largest = max(tensor.bytes for tensor in plan.problem.tensors)
    assert peak.bytes <= held <= peak.bytes + largest
    assert sum(peak.by_kind.values()) == held


@pytest.mark.parametrize("name", CASES)
def test_every_checkpoint_is_told(name):
    plan = plan_of(name)
    told = facts.kept(plan)
    assert {one.tensor for one in told} == set(plan.checkpoints)
    sizes = {tensor.name: tensor.bytes for tensor in plan.problem.tensors}
    assert all(one.bytes == sizes[one.tensor] and one.origin and one.why for one in told)


def test_why_a_tensor_is_kept(graph):
    x = v1.placeholder(tf.float32, (1000, 100))
    h = x
    for i in range(12):
        with tf.name_scope(f"block_{i}"):
            h = tf.tanh(h, name="activation")
        if i == 5:
            h *= tf.random.uniform(h.shape, name="noise")
    loss = tf.reduce_sum(h)
    gradients(loss, x, checkpoints=["block_2/activation", "block_8/activation"])
    told = {one.tensor: one for one in facts.kept(get_plans()[-1])}
    assert told["block_2/activation:0"].why == "you gave it"
    assert told["block_2/activation:0"].origin == "block_2"
    assert told["block_2/activation:0"].shape == "(1000, 100)"
    assert told["block_2/activation:0"].dtype == "float32"
    noise = next(one for name, one in told.items() if "noise" in name)
    assert noise.why == "must not run twice (RandomUniform)"
    gradients(loss, x, checkpoints="memory")
    plan = get_plans()[-1]
    starts = [one for one in facts.kept(plan) if one.why.startswith("start of segment")]
    assert starts
    number = int(starts[0].why.split()[-1].strip("s"))
    part = facts.segments(plan)[number - 1]
    assert part.first.startswith("block_")


def test_kinds_of_bytes_at_the_peak(graph):
    table = tf.Variable(tf.zeros((5000, 100)))
    x = v1.placeholder(tf.float32, (100, 5000))
    h = x @ table
    for _ in range(4):
        h = tf.tanh(h)
    gradients(tf.reduce_sum(h), [x, table], checkpoints="memory", memory_budget=1.0)
    plan = get_plans()[-1]
    assert facts.at_peak(plan).by_kind[facts.OF_WEIGHTS] == 5000 * 100 * 4
