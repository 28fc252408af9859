"""Devices that costs are estimated for."""

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph import devices
from memory_saving_gradients.graph.costs import estimate_seconds
from memory_saving_gradients.graph.devices import DEVICES, LOCAL, check_device, described, usual
from memory_saving_gradients.graph.shapes import Shapes
from test_models import Chain, build_v1


@pytest.mark.parametrize("name", [*DEVICES, LOCAL])
@pytest.mark.sweep(3)
def test_every_device_can_be_planned_for(graph, name):
    step = build_v1(Chain(16, 64), 512)
    gradients(step.loss, step.variables, memory_budget=0.5, device=name)
    assert get_plans()[-1].peak_bytes <= get_plans()[-1].budget_bytes


def test_faster_devices_take_less_time(graph):
    tf.matmul(tf.zeros((2048, 2048)), tf.zeros((2048, 2048)), name="product")
    operations = graph.get_operations()
    shapes = Shapes(operations)
    seconds = {
        name: estimate_seconds(operations, shapes, described(name))["product"] for name in DEVICES
    }
    assert sorted(seconds, key=seconds.__getitem__) == ["h100", "a100", "v100", "t4", "cpu"]
    # The tensor cores of an A100 multiply 156 TFLOP/s in TF32; kernels reach half.
    assert seconds["a100"] == pytest.approx(2 * 2048**3 / 78e12, rel=0.2)


def test_costs_are_those_of_the_gpu_if_there_is_one(monkeypatch):
    assert usual() == "cpu"
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    assert usual() == LOCAL
    properties = {"num_cores": 132, "environment": {"architecture": "9.0"}, "type": "GPU"}
    monkeypatch.setattr(devices, "local_devices", lambda: [{"type": "CPU"}, properties])
    h100 = described("h100")
    assert described(LOCAL) == {key: h100[key] for key in properties}


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match='"a100"'):
        check_device("abacus")
