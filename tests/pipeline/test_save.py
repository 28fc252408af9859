"""The net under everything, and steps that are planned as a whole."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape, get_plans, gradients
from memory_saving_gradients import keras as msg_keras
from memory_saving_gradients.graph import order
from memory_saving_gradients.measure import session_peak
from memory_saving_gradients.pipeline import plan_and_rewrite, save
from memory_saving_gradients.rewriting import waves
from tests.cases import assert_same

v1 = tf.compat.v1
WIDTH = 64


class Injected(Exception):
    pass


def weights(count=8):
    initial = np.random.default_rng(1).standard_normal((count, WIDTH, WIDTH), "float32")
    return [tf.Variable(w * 0.1) for w in initial]


def deep(x, layers):
    for w in layers:
        x = tf.tanh(tf.sin(tf.matmul(x, w)))
    return x


# Our own errors.


def fail(monkeypatch, where=waves.Waves, name="hold"):
    def failing(*args, **kwargs):
        op = tf.constant(0.0, name="the_op").op
        raise Injected(f"while at {op.type}")

    monkeypatch.setattr(where, name, failing)
    monkeypatch.delenv(save.STRICT)


MESSAGE = r'Injected at the op "the_op.*" \(Const\): while at Const.*report it'


def test_an_error_of_ours_leaves_a_graph_plain(graph, monkeypatch):
    fail(monkeypatch)
    layers = weights()
    loss = tf.reduce_mean(deep(tf.ones((512, WIDTH)), layers))
    plain = tf.gradients(loss, layers)
    with pytest.warns(UserWarning, match=MESSAGE):
        ours = gradients(loss, layers, checkpoints="memory")
    assert not get_plans()
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        assert_same(*session.run([ours, plain]))


def test_an_error_of_ours_leaves_a_step_plain(monkeypatch):
    fail(monkeypatch)
    layers = weights()

    @tf.function
    def step(tape):
        with tape as t:
            loss = tf.reduce_mean(deep(tf.ones((512, WIDTH)), layers))
        return t.gradient(loss, layers)

    with pytest.warns(UserWarning, match=MESSAGE):
        ours = step(GradientTape())
    assert_same(ours, step(tf.GradientTape()))


def test_an_error_of_ours_never_ends_fit(monkeypatch):
    fail(monkeypatch, plan_and_rewrite, "decide")

    def fit(save):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(WIDTH, "tanh") for _ in range(6)])
        model.compile("sgd", "mse", jit_compile=False)
        if save:
            msg_keras.save_memory(model)
        x = tf.ones((64, WIDTH))
        return model.fit(x, x, epochs=2, verbose=0).history

    with pytest.warns(UserWarning, match="fault of ours"):
        ours = fit(True)
    assert ours == fit(False)


def test_strict_raises(graph, monkeypatch):
    fail(monkeypatch)
    monkeypatch.setenv(save.STRICT, "1")
    layers = weights()
    loss = tf.reduce_mean(deep(tf.ones((512, WIDTH)), layers))
    with pytest.raises(Injected):
        gradients(loss, layers, checkpoints="memory")


def test_a_cycle_is_taken_back(graph, monkeypatch):
    """An edge from the end to the start, as a wrong schedule would make it."""

    def enforce(self, runs, copies):
        real(self, runs, copies)
        first = next(run.op for run in runs if run.in_backward and not run.copy)
        waves.tf_private.add_control_inputs(first, [runs[-1].op])

    real = waves.Waves.hold
    monkeypatch.setattr(waves.Waves, "hold", enforce)
    layers = weights()
    loss = tf.reduce_mean(deep(tf.ones((512, WIDTH)), layers))
    with pytest.raises(order.CycleError, match=r"\d+ ops in a cycle: .* -> "):
        gradients(loss, layers, checkpoints="memory")
    order.check_acyclic(graph)
    monkeypatch.delenv(save.STRICT)
    with pytest.warns(UserWarning, match="CycleError"):
        ours = gradients(loss, layers, checkpoints="memory")
    order.check_acyclic(graph)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        assert_same(*session.run([ours, tf.gradients(loss, layers)]))


# Several backward passes in one step.


def gan(tape, **options):
    """A step that trains a large critic and then a small generator: (step, its variables)."""
    critic, generator = weights(10), weights(3)
    plain = tape is tf.GradientTape

    @tf.function
    def step(x):
        losses = []
        for trained in (critic, generator):
            with tape(**({} if plain else options)) as t:
                made = deep(deep(x, generator), critic)
                real = deep(tf.concat([x] * 4, 0), critic) if trained is critic else 0.0
                losses.append(tf.reduce_mean(made) - tf.reduce_mean(real))
            for w, grad in zip(trained, t.gradient(losses[-1], trained), strict=True):
                w.assign_sub(0.1 * grad)
        return losses

    return step, [*critic, *generator]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.3}, {"checkpoints": "speed"}])
def test_a_gan_trains_as_it_would(options):
    x = tf.random.stateless_normal((512, WIDTH), (3, 4))

    def train(tape):
        step, variables = gan(tape, **options)
        losses = [step(x) for _ in range(3)]
        plans = get_plans(step.get_concrete_function(x).graph)
        return [*tf.nest.flatten(losses), *(v.numpy() for v in variables)], plans

    (plain, _), (ours, plans) = train(tf.GradientTape), train(GradientTape)
    assert_same(ours, plain)
    assert len(plans) == 2


def test_a_share_is_one_of_the_whole_step():
    """The generator's own peak is a quarter of the critic's, so half of it is far from possible."""
    x = tf.TensorSpec((512, WIDTH))
    step, _ = gan(GradientTape, memory_budget=0.2)
    first, second = get_plans(step.get_concrete_function(x).graph)
    assert first.budget_bytes == second.budget_bytes == int(0.2 * first.baseline_peak_bytes)
    assert second.baseline_peak_bytes < first.baseline_peak_bytes / 2
    for plan in (first, second):
        assert plan.peak_bytes <= plan.budget_bytes


def test_an_unmet_budget_says_of_which_backward_pass(recwarn):
    x = tf.TensorSpec((512, WIDTH))
    step, _ = gan(GradientTape, memory_budget=0.01)
    with pytest.raises(BudgetError, match=r'gradients of "sub:0" \(test_save.py:\d+: losses'):
        step.get_concrete_function(x)


def two_losses(tape, **options):
    """Two losses of one forward pass, differentiated by a tape each, as GANs are."""
    layers, heads = weights(8), weights(2)

    @tf.function
    def step(x):
        with tape(**options) as first, tape(**options) as second:
            h = deep(x, layers)
            losses = [tf.reduce_mean(tf.matmul(h, head)) for head in heads]
        grads = [t.gradient(loss, layers) for t, loss in zip((first, second), losses, strict=True)]
        for w, one, other in zip(layers, *grads, strict=True):
            w.assign_sub(one + other)
        return losses, grads

    return step


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.4}])
def test_backward_passes_of_one_forward_pass_are_planned_as_one(options):
    x = tf.random.stateless_normal((512, WIDTH), (3, 4))
    step = two_losses(GradientTape, **options)
    (plan,) = get_plans(step.get_concrete_function(x).graph)
    assert plan.peak_bytes < 0.6 * plan.baseline_peak_bytes
    assert_same(step(x), two_losses(tf.GradientTape)(x))


@pytest.mark.usefixtures("deterministic")
def test_a_persistent_tape_is_planned_as_one():
    x = tf.random.stateless_normal((512, WIDTH), (3, 4))

    def run(tape):
        layers = weights()

        @tf.function
        def step(x):
            with tape(persistent=True) as t:
                h = deep(x, layers)
                losses = [tf.reduce_mean(h), tf.reduce_mean(h**2)]
            return [t.gradient(loss, layers) for loss in losses]

        return step(x), get_plans(step.get_concrete_function(x).graph)

    (ours, plans), (plain, _) = run(GradientTape), run(tf.GradientTape)
    assert_same(ours, plain)
    assert len(plans) == 1


def test_micro_batches_are_planned_apart():
    layers = weights()

    @tf.function
    def step(x):
        total = None
        for part in tf.split(x, 2):
            with GradientTape() as t:
                loss = tf.reduce_mean(deep(part, layers))
            grads = t.gradient(loss, layers)
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        return total

    assert len(get_plans(step.get_concrete_function(tf.TensorSpec((512, WIDTH))).graph)) == 2


# What is computed beside the gradients.


def metric(logits):
    """Takes several times the bytes of the logits."""
    return tf.reduce_mean(tf.cumsum(tf.where(tf.sin(logits) > 0, tf.cos(logits), logits), 1))


def with_metric(tape, counted):
    layers, table = weights(), tf.Variable(tf.ones((WIDTH, 8 * WIDTH)) * 0.01)

    @tf.function
    def step(x):
        with tape as t:
            logits = tf.matmul(deep(x, layers), table)
            loss = tf.reduce_mean(tf.nn.log_softmax(logits)[:, 0])
        grads = t.gradient(loss, [*layers, table])
        for w, grad in zip([*layers, table], grads, strict=True):
            w.assign_sub(grad)
        if counted is not None:
            counted.assign_add(metric(logits))
        return loss

    return step


def test_metrics_are_in_the_plan():
    counted = tf.Variable(0.0)
    x = tf.random.stateless_normal((512, WIDTH), (3, 4))
    step = with_metric(GradientTape(), counted)
    (plan,) = get_plans(step.get_concrete_function(x).graph)
    names = " ".join(op.name for op in plan.problem.ops)
    assert "SelectV2" in names
    (without,) = get_plans(with_metric(GradientTape(), None).get_concrete_function(x).graph)
    assert plan.peak_bytes > without.peak_bytes
    other = tf.Variable(0.0)
    assert_same([step(x), counted], [with_metric(tf.GradientTape(), other)(x), other])


def test_the_peak_of_a_step_with_metrics_is_as_predicted():
    counted = tf.Variable(0.0)
    x = tf.random.stateless_normal((512, WIDTH), (3, 4))
    step = with_metric(GradientTape(), counted)
    concrete = step.get_concrete_function(x)
    (plan,) = get_plans(concrete.graph)
    assert in_a_session(concrete, x.numpy()) == pytest.approx(plan.peak_bytes, rel=0.1)


def in_a_session(concrete, x):
    """The peak of the ops of a function, run in a session, as those can be traced."""
    given = {}
    with tf.Graph().as_default():
        for handle, inside in concrete.graph.captures:
            variable = next(v for v in concrete.variables if v.handle is handle)
            given[inside.name] = v1.get_variable(
                inside.op.name, initializer=np.full(variable.shape, 0.01, "f"), use_resource=True
            ).handle
        fed = given[concrete.inputs[0].name] = v1.placeholder(tf.float32, x.shape)
        graph_def = concrete.graph.as_graph_def()
        last = [node.name for node in graph_def.node if node.op.startswith("Assign")]
        made = tf.graph_util.import_graph_def(graph_def, given, last, name="")
        with v1.Session(config=v1.ConfigProto(inter_op_parallelism_threads=1)) as session:
            session.run(v1.global_variables_initializer())
            session.run(made, {fed: x})
            return session_peak(session, made, {fed: x})


def test_plans_of_a_trace_that_fails_are_forgotten():
    layers = weights(4)

    @tf.function(autograph=False)
    def step(x):
        with GradientTape() as t:
            loss = tf.reduce_mean(deep(x, layers))
        t.gradient(loss, layers)
        raise Injected

    with pytest.raises(Injected):
        step(tf.ones((512, WIDTH)))


def test_warnings_name_the_users_line():
    @tf.function(autograph=False)
    def step(x):
        with GradientTape() as t:
            t.watch(x)
            loss = tf.reduce_sum(x)
        return t.gradient(loss, x)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(step(tf.ones(3)), np.ones(3))
    assert [w.filename for w in found if "memory_saving" in str(w.message)] == [__file__]
