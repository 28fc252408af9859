"""Random Keras models of all layers, optimizers, precisions and callbacks, through `fit`."""

import math
import warnings

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

import memory_saving_gradients as msg
from memory_saving_gradients import BudgetError
from tests.strangers.layers import LAYERS
from tests.strangers.steps import WAYS, without_grappler

pytestmark = pytest.mark.measured

BATCH, FEATURES = 8, 16
#: Layers that the input of a network flows through.
CHAINED = sorted(name for name, entry in LAYERS.items() if entry.flows and len(entry.shapes) < 4)
OPTIMIZERS = sorted(
    name
    for name, value in vars(keras.optimizers).items()
    if isinstance(value, type)
    and issubclass(value, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # which need others
)
PRECISIONS = ["float32", "mixed_bfloat16", "mixed_float16"]
CALLBACKS = {
    "none": lambda: [],
    "early stopping": lambda: [keras.callbacks.EarlyStopping("loss", patience=1)],
    "moving averages": lambda: [keras.callbacks.SwapEMAWeights()],
    "report": lambda: [msg.keras.MemoryReport()],
    "learning rate": lambda: [keras.callbacks.ReduceLROnPlateau("loss", patience=1)],
}
METRICS = ["mse", "mae", "r2_score"]

MODELS = st.fixed_dictionaries(
    {
        "names": st.lists(st.sampled_from(CHAINED), min_size=1, max_size=3),
        "optimizer": st.sampled_from(OPTIMIZERS),
        "precision": st.sampled_from(PRECISIONS),
        "callbacks": st.sampled_from(sorted(CALLBACKS)),
        "metrics": st.sets(st.sampled_from(METRICS), max_size=2).map(sorted),
        "steps_per_execution": st.sampled_from([1, 2]),
    }
)


def network(names):
    inputs = h = keras.Input((FEATURES,))
    for name in names:
        entry = LAYERS[name]
        h = keras.layers.Dense(FEATURES, "tanh")(keras.layers.Flatten()(h))
        fed = []
        for shape in entry.shapes:
            one = keras.layers.Dense(math.prod(shape), "tanh")(h)
            one = keras.layers.Reshape(shape)(one)
            if entry.high:
                one = keras.layers.Rescaling(entry.high / 2, entry.high / 2)(one)
            fed.append(one)
        outputs = entry.apply(entry.make(), *fed)
        flat = [y for y in keras.tree.flatten(outputs) if "float" in y.dtype]
        h = keras.layers.Concatenate()([keras.layers.Flatten()(y) for y in flat] + [h])
    return keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(h))


def fit(model, way, grappler=True):
    """History, weights and plans of a short training."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy(model["precision"])
    try:
        made = network(model["names"])
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = getattr(keras.optimizers, model["optimizer"])(
        **({"use_ema": True} if model["callbacks"] == "moving averages" else {})
    )
    if model["optimizer"] == "ScheduleFreeAdamW":  # in a trace, Keras loses its initial values
        optimizer.build(made.trainable_variables)
    made.compile(
        optimizer,
        "mse",
        metrics=model["metrics"],
        jit_compile=False,
        steps_per_execution=model["steps_per_execution"],
    )
    callbacks = CALLBACKS[model["callbacks"]]()
    if way:
        msg.keras.save_memory(made, **way)
    elif model["callbacks"] == "report":
        callbacks = []
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3 * BATCH + 3, FEATURES), "float32")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        history = made.fit(
            x, x[:, :1], batch_size=BATCH, epochs=2, verbose=0, shuffle=False, callbacks=callbacks
        )
    losses = [v for name, v in sorted(history.history.items()) if name != "learning_rate"]
    return [np.array(losses), *made.get_weights()]


def same(ours, plain):
    pairs = zip(ours, plain, strict=True)
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


class PlainFails(Exception):
    """Keras cannot train the model."""


def compare(model, way):
    try:
        plain = fit(model, None)
    except Exception as error:
        raise PlainFails(str(error)) from error
    options = dict(WAYS[way])
    for _ in range(3):  # Keras traces a step twice where metrics are built by the first
        try:
            ours = fit(model, options)
            break
        except BudgetError as error:
            options = {"memory_budget": f"{error.lowest_peak_bytes}B"}
    if not same(ours, plain):
        hypothesis.event("Grappler rounds otherwise")
        with without_grappler():
            assert same(fit(model, options), fit(model, None))


def fuzz(examples, **settings):
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=True,
        **settings,
    )
    @hypothesis.given(MODELS, st.sampled_from(["memory", "speed", "half"]))
    def example(model, way):
        try:
            compare(model, way)
        except PlainFails:
            hypothesis.reject()
        counted.append(model)

    counted = []
    example()
    print(f"{len(counted)} random Keras models")


@pytest.mark.usefixtures("deterministic")
def test_random_keras_models():
    fuzz(3, database=None)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
def test_many_random_keras_models():
    fuzz(300)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", CHAINED)
def test_every_layer_through_fit(name):
    index = CHAINED.index(name)
    model = {
        "callbacks": "none",
        "metrics": ["mse"],
        "steps_per_execution": 1,
        "names": [name],
        "optimizer": OPTIMIZERS[index % len(OPTIMIZERS)],
    }
    try:
        compare(model | {"precision": PRECISIONS[index % len(PRECISIONS)]}, "memory")
    except PlainFails:  # the layer has no kernel for that precision
        compare(model | {"precision": "float32"}, "memory")
