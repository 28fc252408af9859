"""Budgets of what a device has: less variables and inputs, and the plain step where that fits."""

import re

import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients import measure
from memory_saving_gradients.graph import devices
from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.pipeline import device_budget
from test_models import Chain

WIDTH, BATCH, LAYERS = 64, 4096, 12
INPUT = BATCH * WIDTH * 4


def by_function(**options):
    model = Chain(layers=LAYERS, width=WIDTH)

    @tf.function
    def step(x):
        return msg.gradients(model.loss(x), model.variables, **options)

    graph = step.get_concrete_function(tf.TensorSpec((None, WIDTH))).graph
    return msg.get_plans(graph)[-1], model


def variables_bytes(model):
    return sum(v.shape.num_elements() * v.dtype.size for v in model.variables)


def has(monkeypatch, free=None, gpu=None, used=0):
    monkeypatch.setattr(device_budget, "available_bytes", lambda: free)
    monkeypatch.setattr(device_budget, "local_gpu_bytes", lambda: gpu)
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda device: {"current": used, "peak": used}
    )


def test_what_the_system_has_free_less_inputs(monkeypatch):
    has(monkeypatch, free=10 * INPUT)
    plan, _ = by_function(memory_budget="device", batch_size=BATCH)
    assert plan.budget_bytes == 9 * INPUT - INPUT
    assert plan.recomputed
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    plan, _ = by_function(memory_budget="70% of device", batch_size=BATCH)
    assert plan.budget_bytes == 7 * INPUT - INPUT


def test_the_plain_step_where_that_fits(monkeypatch):
    has(monkeypatch, free=1000 * INPUT)
    plan, _ = by_function(memory_budget="device", batch_size=BATCH)
    assert not plan.recomputed


def test_variables_of_a_session_are_still_to_come(monkeypatch):
    has(monkeypatch, free=10 * INPUT)
    with tf.Graph().as_default() as graph:
        model = Chain(layers=LAYERS, width=WIDTH)
        x = tf.compat.v1.placeholder(tf.float32, (BATCH, WIDTH))
        loss = model.loss(x)
        msg.gradients(loss, model.variables, memory_budget="device")
        (plan,) = msg.get_plans(graph)
        assert plan.budget_bytes == 9 * INPUT - INPUT - variables_bytes(model)


@pytest.mark.parametrize("used", [0, 2 * INPUT])
def test_of_a_gpu_what_is_in_use_or_the_variables(monkeypatch, used):
    has(monkeypatch, gpu=12 * INPUT, used=used)
    plan, model = by_function(memory_budget="75% of device", batch_size=BATCH)
    taken = max(used, variables_bytes(model)) + INPUT
    assert plan.budget_bytes == 9 * INPUT - taken


def test_of_a_gpu_that_is_not_there(monkeypatch):
    has(monkeypatch, free=10 * INPUT)
    plan, model = by_function(memory_budget="50% of device", batch_size=BATCH, device="h100")
    assert plan.budget_bytes == 40 * 10**9 - variables_bytes(model) - INPUT


def test_where_nothing_fits_the_batch_that_would_is_named(monkeypatch):
    has(monkeypatch, free=3 * INPUT)
    with pytest.raises(BudgetError, match=r"make the batch smaller, to about \d+") as raised:
        by_function(memory_budget="device", batch_size=BATCH)
    batch = int(re.search(r"to about (\d+)", str(raised.value))[1])
    assert 0 < batch < BATCH
    plan, _ = by_function(memory_budget=raised.value.budget_bytes, batch_size=int(0.8 * batch))
    assert plan.peak_bytes <= raised.value.budget_bytes


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("1000000\n")
    (tmp_path / "current").write_text("400000\n")
    group = (str(tmp_path / "max"), str(tmp_path / "current"))
    monkeypatch.setattr(measure, "_CGROUPS", [group, ("/no/group", "/no/group")])
    assert measure.available_bytes() == 600_000
    (tmp_path / "max").write_text("max\n")
    assert measure.available_bytes() > 2**20


def test_of_a_gpu_no_more_than_its_configuration_allows(monkeypatch):
    class Configuration:
        memory_limit = 3

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(
        devices, "local_devices", lambda: [{"type": "CPU"}, {"type": "GPU", "memory_size": 2**30}]
    )
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    assert devices.local_gpu_bytes() == 2**30
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda gpu: [Configuration()]
    )
    assert devices.local_gpu_bytes() == 3 * 2**20


def test_the_largest_batch_of_the_device(monkeypatch):
    has(monkeypatch, free=40 * 10**6)
    model = tf.keras.Sequential(
        [tf.keras.Input((64,)), *[tf.keras.layers.Dense(64, "tanh") for _ in range(4)]]
    )
    found = msg.max_batch(model, "device")
    assert found.memory_bytes == 36 * 10**6
