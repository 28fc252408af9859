"""The whole training step is planned: updates of variables come as their gradients do."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import memory_saving_gradients as msg
from memory_saving_gradients import measure
from memory_saving_gradients.graph import order
from memory_saving_gradients.pipeline import prove
from memory_saving_gradients.reading.measured_costs import CannotMeasure
from memory_saving_gradients.report import facts

v1 = tf.compat.v1

WIDTH, LAYERS, BATCH = 512, 8, 16
WEIGHTS = LAYERS * WIDTH * WIDTH * 4  # bytes

OPTIMIZERS = {
    "sgd": functools.partial(keras.optimizers.SGD, 0.01),
    "momentum": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9),
    "nesterov": functools.partial(keras.optimizers.SGD, 0.01, momentum=0.9, nesterov=True),
    "adam": keras.optimizers.Adam,
    "amsgrad": functools.partial(keras.optimizers.Adam, amsgrad=True),
    "adamw": keras.optimizers.AdamW,
    "rmsprop": functools.partial(keras.optimizers.RMSprop, momentum=0.5, centered=True),
    "adagrad": keras.optimizers.Adagrad,
    "lion": keras.optimizers.Lion,
    "clipped": functools.partial(keras.optimizers.Adam, global_clipnorm=0.1),
    "clipped_each": functools.partial(keras.optimizers.Adam, clipnorm=0.1),
    "averaged": functools.partial(keras.optimizers.Adam, use_ema=True),
    "accumulated": functools.partial(keras.optimizers.Adam, gradient_accumulation_steps=2),
    "adadelta": keras.optimizers.Adadelta,
    "adafactor": keras.optimizers.Adafactor,
    "adamax": keras.optimizers.Adamax,
    "ftrl": keras.optimizers.Ftrl,
    "lamb": keras.optimizers.Lamb,
    "muon": keras.optimizers.Muon,
    "nadam": keras.optimizers.Nadam,
    # Starts from the values of the weights. Keras alone loses these if it builds the optimizer
    # within a trace, so `make_model` builds it before.
    "schedule_free": keras.optimizers.ScheduleFreeAdamW,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
}

# These are made of the same kinds of updates as others.
ALIKE = ("adadelta", "adamax", "ftrl", "lamb", "nadam", "nesterov", "adamw", "amsgrad")

# All gradients wait for one another, or none does in the plain step either.
SAVING_NOTHING = ("accumulated", "scaled")


def make_model(optimizer, saves):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    dense = [layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    if optimizer == "schedule_free":
        model.optimizer.build(model.trainable_variables)
    return msg.keras.save_memory(model) if saves else model


def batch():
    return np.random.default_rng(0).standard_normal((2, BATCH, WIDTH), dtype=np.float32)


def trained(optimizer, saves):
    """All variables after three steps, and the model."""
    model = make_model(optimizer, saves)
    x, y = batch()
    for _ in range(3):
        model.train_on_batch(x, y)
    return [np.array(v) for v in (*model.weights, *model.optimizer.variables)], model


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(n, marks=[pytest.mark.slow] if n in ALIKE else []) for n in OPTIMIZERS],
)
@pytest.mark.sweep(3)
def test_all_variables_are_updated_alike_bit_for_bit(optimizer):
    plain, _ = trained(optimizer, False)
    ours, model = trained(optimizer, True)
    assert msg.keras.get_plans(model) or optimizer in SAVING_NOTHING
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("deterministic")
def test_a_gradient_dies_when_its_variable_is_updated():
    plan = msg.keras.get_plans(trained("adam", True)[1])[-1]
    assert plan.labels.waited_for == ""
    assert facts.most_of_weights(plan) < 0.4 * WEIGHTS
    assert facts.UPDATE in facts.at_peak(plan).by_kind


@pytest.mark.usefixtures("deterministic")
def test_what_waits_for_a_global_norm_is_said(capsys):
    plan = msg.keras.get_plans(trained("clipped", True)[1])[-1]
    assert plan.labels.waited_for
    assert facts.most_of_weights(plan) >= 0.9 * WEIGHTS
    plan.summary()
    assert plan.labels.waited_for in capsys.readouterr().out


@pytest.mark.usefixtures("deterministic")
def test_variables_that_a_trace_creates_are_made_before_it_runs():
    """As long as nothing else leads to their first values, TensorFlow lifts these out."""
    made = []

    @tf.function(autograph=False)
    def step(x):
        if not made:
            made.extend(tf.Variable(tf.random.normal((WIDTH, WIDTH)) / 20) for _ in range(LAYERS))
            made.extend(tf.Variable(tf.zeros((WIDTH, WIDTH))) for _ in range(LAYERS))
            graphs.append(tf.compat.v1.get_default_graph())
        weights, slots = made[:LAYERS], made[LAYERS:]
        with msg.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(tf.square(h))
        for slot, w, g in zip(slots, weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(slot.assign(0.9 * slot + g))
        return loss

    graphs = []
    step(tf.constant(batch()[0]))
    assert msg.get_plans(graphs[0])
    assigns = [op for op in order.of_new_variables(graphs[0]) if op.type == "If"]
    assert len(assigns) == 2 * LAYERS
    needed = order.dependencies(op.inputs[-1].op for op in assigns)
    assert not any(op.type == "Placeholder" for op in needed)
    assert all(np.isfinite(v).all() and v.any() for v in (v.numpy() for v in made))


def make_step(optimizer, saves):
    model = make_model(optimizer, saves)
    return functools.partial(model.train_on_batch, *batch())


@pytest.mark.measured
def test_measured_in_a_default_process():
    plain = measure.function_peak(make_step, "clipped", False)
    ours = measure.function_peak(make_step, "adam", True)
    assert plain > 0.9 * WEIGHTS  # all gradients wait for the norm
    assert ours < 0.7 * WEIGHTS


def test_a_step_that_cannot_be_measured_trains_on(monkeypatch):
    def refuse(*arguments):
        raise CannotMeasure("it reads what has no stand-in")

    monkeypatch.setattr(prove, "stand_ins", refuse)
    keras.utils.set_random_seed(0)
    dense = [layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile("adam", "mse", jit_compile=False)
    msg.keras.save_memory(model, memory_budget=int(0.6 * WEIGHTS), verify=True)
    with pytest.warns(UserWarning, match="not measured"):
        model.train_on_batch(*batch())
    assert msg.keras.get_plans(model)[-1].peak_bytes <= 0.6 * WEIGHTS


@pytest.mark.usefixtures("deterministic")
def test_a_function_of_ones_own_under_our_tape():
    """And what it returns lives: a gradient, and an activation."""
    weights = [tf.Variable(tf.eye(WIDTH) * 0.5) for _ in range(LAYERS)]
    start = [w.numpy() for w in weights]

    def step(tape_class, x):
        with tape_class() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean(tf.square(h))
        grads = tape.gradient(loss, weights)
        for w, g in zip(weights, grads, strict=True):
            w.assign_sub(0.1 * g + 0.01 * w)
        return grads[3], h

    found = []
    for tape_class in (tf.GradientTape, msg.GradientTape):
        for w, value in zip(weights, start, strict=True):
            w.assign(value)
        function = tf.function(functools.partial(step, tape_class), autograph=False)
        concrete = function.get_concrete_function(tf.TensorSpec((BATCH, WIDTH)))
        returned = concrete(tf.constant(batch()[0]))
        found.append([*(r.numpy() for r in returned), *(w.numpy() for w in weights)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (plan,) = msg.get_plans(concrete.graph)
    assert len(plan.problem.results) == 2


V1_OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(),
}


def v1_training(optimizer, apply, patched):
    """The variables after three steps in a session, the peak of one, and the plans."""
    tf.keras.backend.clear_session()
    with tf.Graph().as_default() as graph, patched or contextlib.nullcontext():
        x = v1.placeholder(tf.float32, (BATCH, WIDTH))
        weights = [
            v1.get_variable(f"w{i}", initializer=np.eye(WIDTH, dtype=np.float32) / 2)
            for i in range(LAYERS)
        ]
        h = x
        for w in weights:
            h = tf.tanh(h @ w)
        train = apply(V1_OPTIMIZERS[optimizer](), tf.reduce_mean(tf.square(h)))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            feed = {x: batch()[0]}
            for _ in range(3):
                session.run(train, feed)
            values = session.run(v1.global_variables())
            return values, measure.session_peak(session, train, feed), msg.get_plans(graph)


def minimize(optimizer, loss):
    return optimizer.minimize(loss)


def clipped(optimizer, loss):
    pairs = optimizer.compute_gradients(loss)
    grads, norm = tf.clip_by_global_norm([g for g, _ in pairs], 0.1)
    with tf.control_dependencies([norm]):
        return optimizer.apply_gradients(zip(grads, [v for _, v in pairs], strict=True))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("apply", [minimize, clipped])
@pytest.mark.parametrize("optimizer", V1_OPTIMIZERS)
@pytest.mark.sweep(2)
def test_optimizers_of_v1_update_alike(optimizer, apply):
    plain, _, _ = v1_training(optimizer, apply, None)
    ours, peak, plans = v1_training(optimizer, apply, msg.patch())
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    if apply is minimize:  # else all gradients wait for the norm, and nothing is saved
        assert abs(peak - plans[-1].peak_bytes) < 0.1 * plans[-1].peak_bytes
        assert peak < 0.5 * WEIGHTS


@pytest.mark.usefixtures("deterministic")
def test_weight_decay_comes_after_loops_that_may_run_again():
    """It needs no gradient, and a loop reads its variables itself."""

    def weights(saves):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        x = h = keras.Input((24, 8))
        for _ in range(3):
            h = layers.RNN(layers.LSTMCell(16), return_sequences=True)(h)
            h = layers.Dense(16, "tanh")(h)
        model = keras.Model(x, layers.Dense(1)(layers.Flatten()(h)))
        model.compile("adamw", "mse", jit_compile=False)
        if saves:
            msg.keras.save_memory(model)
        fed = np.random.default_rng(0).standard_normal((8, 24, 8), dtype="f")
        for _ in range(3):
            model.train_on_batch(fed, fed[:, 0, :1])
        assert not saves or msg.keras.get_plans(model)[-1].loops
        return model.get_weights()

    for ours, plain in zip(weights(True), weights(False), strict=True):
        np.testing.assert_array_equal(ours, plain)
