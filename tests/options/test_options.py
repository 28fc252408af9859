"""The options of the doors: the same everywhere."""

import inspect

import keras
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.options.options import MoreOptions, Options
from test_models import Chain

WIDTH = 64


def network():
    return keras.Sequential(
        [keras.Input((WIDTH,)), *[keras.layers.Dense(WIDTH, "tanh") for _ in range(12)]]
    )


def by_gradients(x, **options):
    model = Chain(layers=12, width=WIDTH)

    @tf.function
    def step(x):
        return msg.gradients(model.loss(x), model.variables, **options)

    return msg.get_plans(step.get_concrete_function(x).graph)


def by_tape(x, **options):
    model = Chain(layers=12, width=WIDTH)

    @tf.function
    def step(x):
        with msg.GradientTape(**options) as tape:
            loss = model.loss(x)
        return tape.gradient(loss, model.variables)

    return msg.get_plans(step.get_concrete_function(x).graph)


def by_patch(x, **options):
    model = Chain(layers=12, width=WIDTH)

    @tf.function
    def step(x):
        return tf.gradients(model.loss(x), model.variables)

    with msg.patch(**options) as patched:
        step.get_concrete_function(x)
    return patched.plans[-1:]


def by_fit(x, **options):
    keras.utils.clear_session()  # so that layers have the same names again
    model = msg.keras.save_memory(network(), **options)
    model.compile("sgd", "mse")
    model.train_on_batch(x, x)
    return msg.keras.get_plans(model)


DOORS = {"gradients": by_gradients, "tape": by_tape, "patch": by_patch, "fit": by_fit}


def test_the_table_of_options_is_complete():
    fields = inspect.signature(Options).parameters
    assert [*fields] == ["checkpoints", "memory_budget", *MoreOptions.__annotations__]
    of_gradients = [*inspect.signature(msg.gradients).parameters]
    assert of_gradients[-len(fields) + 1 :] == ["memory_budget", *MoreOptions.__annotations__]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_every_option(door, tmp_path):
    """One plan is made with all that goes together, and applied again from its file."""
    x = tf.zeros((512, WIDTH))
    (plan,) = DOORS[door](
        x,
        max_overhead=0.2,
        max_recompute=1,
        plan_cache=tmp_path / "plans",
        device="a100",
        cost_model="analytical",
        batch_size=512,
        verify=False,
        running_sums=True,
    )
    assert plan.strategy == "overhead"
    assert 0 < plan.overhead <= 0.2
    assert [*(tmp_path / "plans").iterdir()]
    plan.save(tmp_path / "plan.json")
    (again,) = DOORS[door](x, plan=tmp_path / "plan.json")
    assert again.schedule == plan.schedule


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_an_unknown_option(door):
    with pytest.raises(TypeError, match="memory_budgets"):
        DOORS[door](tf.zeros((8, WIDTH)), memory_budgets=0.5)


def test_a_folder_for_plans_is_a_path():
    with pytest.raises(TypeError, match="plan_cache must be the path of a folder, got True"):
        Options("memory", plan_cache=True)
