"""The zoo: every model is planned, without an exception and without a cycle; some are run."""

import keras
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape, get_plans
from tests.strangers.steps import WAYS, asked_for, loss_of, todays
from tests.strangers.zoo import ZOO, specified


def variables_of(model):
    return [v.value for v in model.variables if v.dtype != "string"]


@pytest.mark.parametrize("name", todays(ZOO, 6))
def test_models_of_the_day_are_planned(name, monkeypatch):
    plan(name, "memory", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_all_models_are_planned(name, way, monkeypatch):
    plan(name, way, monkeypatch)


def plan(name, way, monkeypatch):
    """Traces a step; strict, so that a cycle or another fault of ours would raise."""
    keras.backend.clear_session()
    model, inputs = ZOO[name]()

    @tf.function(autograph=False)
    def step(inputs):
        with GradientTape(**WAYS[way]) as tape:
            loss = loss_of(model(inputs, training=True))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    with asked_for(way, monkeypatch):
        try:
            graph = step.get_concrete_function(specified(inputs)).graph
        except BudgetError:  # weights take more than half
            return
    for plan in get_plans(graph):
        assert (
            plan.peak_bytes <= (plan.budget_bytes or plan.baseline_peak_bytes) or way == "all again"
        )
        print(f"{name}, {way}: {len(plan.problem.ops)} ops, {plan.seconds:.1f} s to plan")
