"""Budgets as a user gives them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import (
    BudgetError,
    GradientTape,
    get_plans,
    gradients,
    gradients_memory,
)
from memory_saving_gradients.graph.shapes import WrongSize
from memory_saving_gradients.options.budgets import parse_budget
from memory_saving_gradients.pipeline import prove
from memory_saving_gradients.pipeline.decide import WrongPlan
from memory_saving_gradients.proving.compiler import CannotCompile
from memory_saving_gradients.reading.measured_costs import CannotMeasure
from memory_saving_gradients.runtimes.executor import Executor
from test_models import Chain, build_v1

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (2**20, 2**20),
        (np.int64(3_000_000), 3_000_000),
        ("7B", 7),
        ("1000", 1000),
        ("800MB", 800 * 10**6),
        ("800 mb", 800 * 10**6),
        ("1.5GiB", 3 * 2**29),
        (".5 KiB", 512),
        ("2kB", 2000),
        ("3T", 3 * 10**12),
        (0.5, 0.5),
        (1.0, 1.0),
        (np.float32(0.25), 0.25),
    ],
)
def test_budgets_that_are_understood(said, meant):
    assert parse_budget(said) == meant
    assert type(parse_budget(said)) is type(meant)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (0, ValueError),
        (-5, ValueError),
        (50, ValueError),
        (8192, ValueError),
        (2**20 - 1, ValueError),
        (0.0, ValueError),
        (-0.5, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("", ValueError),
        ("lots", ValueError),
        ("-3MB", ValueError),
        ("3 parsecs", ValueError),
        ("0MB", ValueError),
        (True, TypeError),
        ([800], TypeError),
        (1j, TypeError),
    ],
)
def test_budgets_that_are_not(said, error):
    with pytest.raises(error, match="memory_budget"):
        parse_budget(said)


@pytest.mark.parametrize("said", ["0.5", "50%"])
def test_a_share_that_is_written_as_a_string_is_pointed_out(said):
    with pytest.raises(ValueError, match=r"did you mean the number 0\.5\?"):
        parse_budget(said)


def chain():
    return build_v1(Chain(16, 64), 512)


def plan_of(graph):
    return get_plans(graph)[-1]


def test_a_plan_keeps_its_budget_and_knows_how_good_it_is(graph):
    step = chain()
    gradients(step.loss, step.variables, memory_budget="2.5MB")
    plan = plan_of(graph)
    assert plan.strategy == "budget"
    assert plan.budget_bytes == 2_500_000
    assert plan.peak_bytes <= 2_500_000 < plan.baseline_peak_bytes
    assert 0 < plan.lower_bound <= plan.overhead
    assert plan.gap == pytest.approx(plan.overhead - plan.lower_bound)
    assert "2.5 MB" in str(plan)


def test_a_share_is_one_of_the_baseline_peak(graph):
    step = chain()
    gradients(step.loss, step.variables, memory_budget=0.5)
    plan = plan_of(graph)
    assert plan.budget_bytes == plan.baseline_peak_bytes // 2
    assert plan.peak_bytes <= plan.budget_bytes


def test_less_memory_costs_more(graph):
    step = chain()
    for share in (0.8, 0.5, 0.3):
        gradients(step.loss, step.variables, memory_budget=share)
    overheads = [plan.overhead for plan in get_plans(graph)]
    assert overheads == sorted(overheads)
    assert overheads[0] < overheads[-1]


@pytest.mark.filterwarnings("error")
def test_a_budget_that_is_met_anyway_leaves_the_graph_plain(graph):
    step = chain()
    gradients(step.loss, step.variables, memory_budget="1GB")
    assert plan_of(graph).overhead == 0
    assert not plan_of(graph).recomputed
    assert not [op for op in graph.get_operations() if op.name.startswith("recompute")]


def test_an_impossible_budget_says_what_is_possible_and_leaves_the_graph_plain(graph):
    step = chain()
    with tf.Graph().as_default() as plain:
        same = chain()
        tf.gradients(same.loss, same.variables)
    with pytest.raises(BudgetError, match="the lowest peak found is") as caught:
        gradients(step.loss, step.variables, memory_budget="1000B")
    assert graph.as_graph_def() == plain.as_graph_def()
    assert caught.value.budget_bytes == 1000
    lowest = caught.value.lowest_peak_bytes
    assert lowest > 1000
    gradients(step.loss, step.variables, memory_budget=f"{lowest}B")
    assert plan_of(graph).peak_bytes <= lowest


def counted_too_high(monkeypatch, scratch):
    """Has predictions count so many bytes for every op that no op takes."""
    monkeypatch.setattr(Executor, "scratch", lambda *_: scratch)


def test_a_budget_that_the_plain_step_keeps_when_measured_is_not_refused(graph, monkeypatch):
    with tf.Graph().as_default() as plain:
        same = chain()
        tf.gradients(same.loss, same.variables)
    counted_too_high(monkeypatch, 20 * 10**6)
    step = chain()
    with pytest.warns(UserWarning, match=r"10.0 MB is kept by no plan .* the plain step, which"):
        gradients(step.loss, step.variables, memory_budget="10MB")
    plan = plan_of(graph)
    assert graph.as_graph_def() == plain.as_graph_def()
    assert plan.peak_bytes == plan.baseline_peak_bytes > 20 * 10**6
    assert 0 < plan.measured_peak_bytes <= plan.budget_bytes == 10**7
    assert not plan.recomputed
    assert plan.overhead == 0


def test_a_budget_that_a_plan_keeps_when_measured_is_not_refused(graph, monkeypatch):
    counted_too_high(monkeypatch, 300_000)
    with tf.Graph().as_default():
        step = chain()
        with pytest.raises(BudgetError) as refused:
            gradients(step.loss, step.variables, memory_budget="1000B")
    budget = refused.value.lowest_peak_bytes - 100_000
    step = chain()
    with pytest.warns(UserWarning, match="the plan of that peak takes"):
        gradients(step.loss, step.variables, memory_budget=f"{budget}B")
    plan = plan_of(graph)
    assert plan.recomputed
    assert plan.measured_peak_bytes <= budget == plan.budget_bytes < plan.peak_bytes


@pytest.mark.parametrize("cause", ["no room", "no run"])
def test_where_nothing_can_be_measured_the_budget_is_refused(graph, monkeypatch, cause):
    def fail(*_):
        raise RuntimeError("no such kernel")

    counted_too_high(monkeypatch, 20 * 10**6)
    if cause == "no room":
        monkeypatch.setattr(prove, "available_bytes", lambda: 10**6)
    monkeypatch.setattr(prove, "session_peak", fail)
    step = chain()
    with pytest.raises(BudgetError, match="the lowest peak found is"):
        gradients(step.loss, step.variables, memory_budget="10MB")


def test_max_recompute_bounds_the_runs(graph):
    step = chain()
    counts = {}
    for most in (1, 2, None):
        try:
            gradients(step.loss, step.variables, memory_budget=0.21, max_recompute=most)
        except BudgetError as error:
            counts[most] = error
        else:
            counts[most] = int(np.bincount(plan_of(graph).schedule).max())
    assert isinstance(counts[1], BudgetError)
    assert counts[2] == 3
    assert counts[None] >= 3


def test_the_lowest_peak_for_an_overhead(graph):
    step = chain()
    peaks = []
    for most in (0.03, 0.1, 0.3):
        gradients(step.loss, step.variables, max_overhead=most)
        plan = plan_of(graph)
        assert plan.strategy == "overhead"
        assert plan.overhead <= most
        peaks.append(plan.peak_bytes)
    assert plan.baseline_peak_bytes > peaks[0] > peaks[1] > peaks[2]
    gradients(step.loss, step.variables, max_overhead=4, max_recompute=1)
    assert np.bincount(plan_of(graph).schedule).max() == 2


def test_what_was_chosen_is_said_in_the_log(graph, caplog):
    step = chain()
    with caplog.at_level("INFO", "memory_saving_gradients"):
        gradients(step.loss, step.variables, checkpoints="auto")
        gradients_memory(step.loss, step.variables)
    assert "the knee" in caplog.text
    assert "one more forward pass" in caplog.text
    auto, memory = get_plans(graph)
    assert memory.peak_bytes <= auto.peak_bytes < auto.baseline_peak_bytes
    assert auto.overhead <= memory.overhead


def test_given_checkpoints_are_kept_within_the_budget(graph):
    step = chain()
    given = [op.outputs[0] for op in graph.get_operations() if op.type == "Tanh"][2:8:2]
    gradients(step.loss, step.variables, checkpoints=given, memory_budget=0.6)
    plan = plan_of(graph)
    assert plan.strategy == "list"
    assert plan.peak_bytes <= plan.budget_bytes
    assert f"with {len(given)} given tensors kept" in str(plan)
    assert {t.name for t in given} <= set(plan.checkpoints)
    assert not {t.op.name for t in given} & set(plan.recomputed)


def test_that_given_checkpoints_are_kept_is_said_where_a_budget_cannot_be_met(graph):
    step = chain()
    tanhs = [op.outputs[0] for op in graph.get_operations() if op.type == "Tanh"]
    for tensor in tanhs:
        tf.compat.v1.add_to_collection("checkpoints", tensor)
    said = rf'say checkpoints="memory": the {len(tanhs)} that were given are kept as well'
    with pytest.raises(BudgetError, match=said):
        gradients(step.loss, step.variables, memory_budget=0.35)
    gradients(step.loss, step.variables, checkpoints="memory", memory_budget=0.35)


def test_speed_with_a_budget_repeats_no_product(graph):
    step = chain()
    gradients(step.loss, step.variables, checkpoints="speed", memory_budget=0.7)
    types = {graph.get_operation_by_name(name).type for name in plan_of(graph).recomputed}
    assert types
    assert "MatMul" not in types


def test_the_fixed_strategies_take_a_budget(graph):
    step = chain()
    gradients_memory(step.loss, step.variables, memory_budget=0.5)
    assert plan_of(graph).strategy == "budget"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_budget": 0}, ValueError, "memory_budget"),
        ({"memory_budget": "many"}, ValueError, "memory_budget"),
        ({"memory_budget": [1]}, TypeError, "memory_budget"),
        ({"memory_budget": "120% of device"}, ValueError, 'up to "100% of device"'),
        ({"memory_budget": "half of device"}, ValueError, "a budget of the device is"),
        ({"memory_budget": 0.5, "max_recompute": 0}, ValueError, "max_recompute"),
        ({"memory_budget": 0.5, "max_recompute": 1.5}, TypeError, "max_recompute"),
        ({"checkpoints": "collection", "max_recompute": 2}, ValueError, "give one of these"),
    ],
)
def test_wrong_options_raise_before_anything_changes(graph, options, error, message):
    step = chain()
    before = graph.as_graph_def()
    with pytest.raises(error, match=message):
        gradients(step.loss, step.variables, **options)
    assert graph.as_graph_def() == before


def _refused(x):
    with GradientTape(memory_budget="1000B") as tape:
        tape.watch(x)
        y = x
        for _ in range(8):
            y = tf.tanh(y)
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def _in_map_fn(x):
    return tf.map_fn(_refused, x)


def _in_for(x):
    for _ in tf.range(3):
        x = _refused(x)
    return x


def _in_while(x):
    while tf.reduce_sum(x) > 0:
        x = _refused(x)
    return x


def _in_cond(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: _refused(x), lambda: x)


def _in_if(x):
    if tf.reduce_sum(x) > 0:
        x = _refused(x)
    return x


def _in_a_function(x):
    return tf.function(_refused)(x)


def _in_a_layer(x):
    return keras.layers.Lambda(lambda x: tf.map_fn(_refused, x))(x)


def _in_a_dataset(x):
    return next(iter(tf.data.Dataset.from_tensors(x).map(_refused)))


@pytest.mark.parametrize(
    "step",
    [
        _refused,
        _in_map_fn,
        _in_for,
        _in_while,
        _in_cond,
        _in_if,
        _in_a_function,
        _in_a_layer,
        _in_a_dataset,
    ],
)
def test_the_error_arrives_as_it_is(step):
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        tf.function(step)(tf.ones((4, 1000)))
    assert caught.value.budget_bytes == 1000


@pytest.mark.parametrize("error", [WrongPlan, WrongSize, CannotMeasure, CannotCompile])
def test_so_do_the_others(error):
    def body(row):
        raise error("said so")

    def step(x):
        return keras.layers.Lambda(lambda x: tf.map_fn(body, x))(x)

    with pytest.raises(error, match="said so"):
        tf.function(step)(tf.ones((4, 1000)))
