"""The zoo: every model is planned, without an exception and without a cycle; some are run."""

import keras
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape, get_plans
from tests.strangers.steps import WAYS, asked_for, compare, loss_of, todays
from tests.strangers.zoo import ZOO, specified

pytestmark = pytest.mark.measured

#: Of these a real step is run, too.
RUN = """MobileNetV2 EfficientNetB0 ResNet50V2 ConvNeXtTiny DenseNetBackbone BertBackbone
GPT2Backbone LlamaBackbone ViTBackbone T5Backbone""".split()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", todays(RUN, 1))
def test_a_real_step_of_the_day_is_that_of_plain(name, monkeypatch):
    run(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", RUN)
def test_all_real_steps_are_those_of_plain(name, monkeypatch):
    run(name, monkeypatch)


def run(name, monkeypatch):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model, inputs = ZOO[name]()

    def forward(*tensors):
        return model(tf.nest.pack_sequence_as(inputs, tensors), training=True)

    variables = [v.value for v in model.variables]
    compare(forward, tf.nest.flatten(inputs), variables, "memory", monkeypatch)


@pytest.mark.parametrize("name", todays(ZOO, 1))
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
