"""`checkpoint()`, as a user calls it: eagerly, in functions, in graphs, under XLA."""

import contextlib
import functools
import gc
import itertools
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients import checkpoint
from tests.cases import assert_same
from tests.parts import (
    NETWORKS,
    POLICIES,
    WIDTH,
    assert_close,
    gradients_of,
    loops_and_branches,
    one_part,
    plainly,
    several_inputs,
    sparse_gradients,
    unused_results,
    weights,
    written_with_statements,
    x_of,
)


@pytest.fixture
def ws():
    return weights()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
@pytest.mark.sweep(5)
def test_eager_gradients_are_those_of_the_tape(network, persistent, policy, ws):
    call = functools.partial(checkpoint, policy=POLICIES[policy])
    for seed in (5, 6):  # the second time it is not traced
        xs = [ws[0], tf.Variable(x_of(seed))]
        plain = gradients_of(network, plainly, xs)
        ours = gradients_of(network, call, xs, persistent)
        # Eagerly, a loop adds the gradients of its rounds in another order.
        (assert_close if network is loops_and_branches else assert_same)(ours, plain)


@pytest.mark.parametrize("compiled", [False, True], ids=["function", "xla"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
@pytest.mark.sweep(5)
def test_gradients_in_a_function(network, compiled, ws):
    if compiled and network is loops_and_branches:
        pytest.skip("XLA does not compile the gradient of a loop of unknown length")
    xs = [ws[0], tf.Variable(x_of())]

    def step(call):
        run = tf.function(functools.partial(gradients_of, network, call, xs), jit_compile=compiled)
        return run()

    if compiled and network is written_with_statements:
        pytest.skip("XLA does not compile the gradient of a loop of unknown length")
    assert_close(step(checkpoint), step(plainly))


def test_what_a_part_calls_lives_as_long_as_the_graph():
    """The loop's gradient calls functions of TensorFlow's own, which nothing else holds."""

    def part(x, w):
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, tf.tanh(a @ w)), [0, x])[1]

    def step(call, x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = call(part, call(part, x, w), w)
        return tape.gradient(y, w)

    given = x_of(), tf.eye(16) * 0.5
    ours = tf.function(functools.partial(step, checkpoint)).get_concrete_function(*given)
    gc.collect()
    assert_close(ours(*given), step(plainly, *given))


@pytest.mark.parametrize("ours", [tf.gradients, msg.gradients_memory], ids=["plain", "ours"])
@pytest.mark.parametrize(
    "network",
    [network for network in NETWORKS if network is not written_with_statements],
    ids=lambda network: network.__name__,
)
@pytest.mark.sweep(5)
def test_gradients_in_a_graph(network, ours):
    def run(call, differentiate):
        with tf.Graph().as_default():
            initial = tf.random.stateless_normal((WIDTH, WIDTH), (0, 1), stddev=0.3)
            w = tf.Variable(initial)
            x = x_of()
            y = network(call, w, x)
            grads = differentiate(y, [w, x])
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                return session.run([y, *grads])

    assert_close(run(checkpoint, ours), run(plainly, tf.gradients))


def dropped(x):
    return tf.nn.dropout(tf.tanh(x), 0.5)


@pytest.mark.parametrize("how", ["eager", "function", "xla"])
def test_the_mask_of_dropout_is_that_of_the_forward_pass(how):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = checkpoint(dropped, x)
        return y, tape.gradient(y, x)

    run = step if how == "eager" else tf.function(step, jit_compile=how == "xla")
    x = x_of(rows=64)
    for _ in range(2):
        y, grad = run(x)
        kept = np.asarray(y) != 0
        assert 0.3 < kept.mean() < 0.7
        expected = np.where(kept, 2.0 * (1.0 - np.tanh(x) ** 2), 0.0)
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)
    assert (np.asarray(run(x)[0]) != np.asarray(y)).any()


@pytest.mark.parametrize("how", ["eager", "function", "graph"])
def test_effects_happen_once(how, capfd):
    with tf.Graph().as_default() if how == "graph" else contextlib.nullcontext():
        count = tf.Variable(0)
        x = tf.ones((2, 2))

        def part(x):
            count.assign_add(1)
            tf.print("ran")
            return tf.tanh(x) * tf.cast(count, tf.float32)

        def step():
            if how == "graph":
                y = checkpoint(part, x)
                return [y, *tf.gradients(y, x)]
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = checkpoint(part, x)
            return y, tape.gradient(y, x)

        if how == "graph":
            with tf.compat.v1.Session() as session:
                fetches = step()
                session.run(count.initializer)
                y, grad = session.run(fetches)
                ran = session.run(count)
        else:
            y, grad = (step if how == "eager" else tf.function(step))()
            ran = count.numpy()
        assert ran == 1
        np.testing.assert_allclose(y, np.tanh(np.ones((2, 2))), rtol=1e-6)
        np.testing.assert_allclose(grad, 1.0 - np.tanh(np.ones((2, 2))) ** 2, rtol=1e-5)
        assert capfd.readouterr().err.count("ran") == 1


@pytest.mark.usefixtures("deterministic")
def test_variables_are_read_once(ws):
    """What is assigned in between does not change the gradients."""

    def run(call):
        w, x = tf.Variable(ws[0]), tf.Variable(x_of())
        with tf.GradientTape() as tape:
            y = one_part(call, w, x)
        w.assign(w * 2.0)
        return tape.gradient(y, [w, x])

    assert_same(run(checkpoint), run(plainly))


@pytest.mark.parametrize("how", ["eager", "function", "xla"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("network", [one_part, several_inputs, unused_results, sparse_gradients])
@pytest.mark.sweep(5)
def test_gradients_of_gradients(network, policy, how, ws):
    xs = [ws[0], tf.Variable(x_of())]

    def second(call):
        def run():
            with tf.GradientTape() as outer:
                _, first = gradients_of(network, call, xs)
                squares = [tf.reduce_sum(tf.convert_to_tensor(g) ** 2) for g in first]
            return [*first, *outer.gradient(squares, xs)]

        return (run if how == "eager" else tf.function(run, jit_compile=how == "xla"))()

    assert_close(second(functools.partial(checkpoint, policy=POLICIES[policy])), second(plainly))


@pytest.mark.parametrize("how", ["eager", "function"])
def test_a_part_that_differentiates_control_flow_itself(how, ws):
    def squared_gradient(x, w):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, tf.tanh(a @ w)), [0, x])[1]
            y = tf.cond(y[0, 0] < 9.0, lambda: tf.sin(y @ w), lambda: y)
        return y * tape.gradient(y, x) ** 2

    xs = [tf.Variable(ws[0]), tf.Variable(x_of())]

    def run(call):
        step = functools.partial(
            gradients_of, lambda call, w, x: call(squared_gradient, x, w), call, xs
        )
        return (step if how == "eager" else tf.function(step))()

    assert_close(run(checkpoint), run(plainly))


@pytest.mark.usefixtures("deterministic")
def test_what_a_part_closes_over_may_be_tensors(ws):
    """Each call sees its own, and none is traced again for them."""
    runs = itertools.count()

    def run(call, x):
        scale = tf.reduce_mean(x) + tf.ones((WIDTH,))

        def part(x):
            next(runs)
            return tf.tanh(x * scale) @ ws[0]

        return tf.reduce_sum(call(part, x))

    for seed in range(3):
        x = x_of(seed)
        assert_same(
            gradients_of(lambda call, x: run(call, x), checkpoint, [x]),
            gradients_of(lambda call, x: run(call, x), plainly, [x]),
        )
    assert next(runs) == 3 + 1  # plainly three times, and traced once


@pytest.mark.usefixtures("deterministic")
def test_variables_are_watched_however_they_come(ws):
    """By closure, as arguments, as results."""
    parts = {
        "closure": lambda x: tf.tanh(x @ ws[0]),
        "argument": functools.partial(lambda x, w: tf.tanh(x @ w), w=ws[0]),
        "result": lambda x: ws[0],
    }
    x = x_of()
    for part in parts.values():
        with tf.GradientTape(persistent=True) as tape:
            ours, plain = checkpoint(part, x), tf.convert_to_tensor(part(x))
        assert_same([ours, tape.gradient(ours, ws[0])], [plain, tape.gradient(plain, ws[0])])


def test_functions_that_are_made_anew_are_traced_once(ws):
    runs = itertools.count()

    def part(x, activation):
        next(runs)
        return tf.tanh(activation(x @ ws[0]))

    x = x_of()
    for _ in range(3):
        with tf.GradientTape() as tape:
            y = checkpoint(
                lambda x: part(x, lambda h: tf.tanh(h)), x, policy=lambda op: op.type == "MatMul"
            )
        assert tape.gradient(y, ws[0]) is not None
    assert next(runs) == 1


def test_forward_mode(ws):
    x = x_of()

    def jvp(call):
        with tf.autodiff.ForwardAccumulator(ws[0], tf.ones_like(ws[0])) as accumulator:
            y = call(lambda x: tf.tanh(x @ ws[0]), x)
        return accumulator.jvp(y)

    np.testing.assert_allclose(jvp(checkpoint), jvp(plainly), rtol=1e-5)


class Block:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return self.body(x)

    @checkpoint
    def decorated(self, x):
        return tf.tanh(x @ self.w)

    @checkpoint(policy="speed")
    def decorated_with_a_policy(self, x):
        return tf.tanh(x @ self.w)

    def body(self, x, repeat=1):
        for _ in range(repeat):
            x = tf.tanh(x @ self.w)
        return x


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "use",
    [
        lambda block, x: checkpoint(block, x),
        lambda block, x: checkpoint(block.body, x),
        lambda block, x: checkpoint(functools.partial(block.body, repeat=1), x),
        lambda block, x: block.decorated(x),
        lambda block, x: block.decorated_with_a_policy(x),
        lambda block, x: checkpoint(block.body)(x, repeat=1),
    ],
    ids=["callable", "method", "partial", "decorated", "with a policy", "wrapped"],
)
def test_ways_to_call_it(use, ws):
    block, x = Block(ws[0]), x_of()
    with tf.GradientTape(persistent=True) as tape:
        ours, plain = use(block, x), block.body(x)
    assert_same([tape.gradient(ours, ws[0])], [tape.gradient(plain, ws[0])])


def test_objects_are_told_apart_and_let_go(ws):
    x = x_of()
    blocks = [Block(w) for w in ws]
    with tf.GradientTape(persistent=True) as tape:
        made = [checkpoint(block, x) for block in blocks]
    for block, y, w in zip(blocks, made, ws, strict=True):
        np.testing.assert_array_equal(y, block.body(x))
        assert tape.gradient(y, w) is not None
    ghosts = [weakref.ref(block) for block in blocks]
    del blocks, block, made, y, tape
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 3


def test_without_a_tape_it_is_a_call():
    seen = []

    def part(x):
        seen.append(x)
        return x.numpy() * 2

    np.testing.assert_array_equal(checkpoint(part, tf.ones(3)), [2.0, 2.0, 2.0])
    assert tf.executing_eagerly()
    assert len(seen) == 1


def test_a_part_without_gradients():
    x = tf.ones((3, 3))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = checkpoint(lambda x: tf.argmax(x, 1), x)
        z = checkpoint(lambda x: {"seven": 7, "none": None}, x)
    np.testing.assert_array_equal(y, [0, 0, 0])
    assert z == {"seven": 7, "none": None}
    assert tape.gradient(y, x) is None


def test_what_cannot_be_traced_says_so():
    x = tf.ones(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(AttributeError) as raised:
            checkpoint(lambda x: x * x.numpy(), x)
    assert "traces" in "".join(raised.value.__notes__)
    assert "Leave it out of the part" in "".join(raised.value.__notes__)


def test_a_fault_of_ours_leaves_the_part_as_it_is(monkeypatch, ws):
    def failing(*args):
        raise KeyError("fault")

    monkeypatch.setattr(sys.modules[checkpoint.__module__], "split", failing)
    xs = [ws[0], tf.Variable(x_of())]
    with pytest.raises(KeyError):
        gradients_of(one_part, checkpoint, xs)
    monkeypatch.delenv("MEMORY_SAVING_GRADIENTS_STRICT")
    with pytest.warns(UserWarning, match="KeyError: 'fault'.*one_part.*is called as it is"):
        ours = gradients_of(one_part, checkpoint, xs)
    assert_same(ours, gradients_of(one_part, plainly, xs))


@pytest.mark.usefixtures("deterministic")
def test_tapes_of_different_things(ws):
    """A part is taken apart anew for other inputs, and a loop is collected once all the same."""
    x = tf.Variable(x_of())
    with msg.patch("memory"):
        for xs in ([ws[0], x], [x], [ws[0]]):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(xs)
                ours = loops_and_branches(checkpoint, ws[0], x)
            with tf.GradientTape() as plain_tape:
                plain = loops_and_branches(plainly, ws[0], x)
            assert_close(tape.gradient(ours, xs), plain_tape.gradient(plain, xs))


def test_wrong_calls():
    x = tf.ones((2, 2))
    with pytest.raises(TypeError, match=r"checkpoint\(block, x\), and not"):
        checkpoint(x, x)
    with pytest.raises(ValueError, match='unknown policy "fast"'):
        checkpoint(tf.tanh, x, policy="fast")
    with pytest.raises(TypeError, match="policy must be"):
        checkpoint(tf.tanh, x, policy=3)
    with pytest.raises(TypeError, match=r"keras\.Checkpoint"):
        checkpoint(tf.tanh, tf.keras.Input((3,)))
    with pytest.raises(TypeError, match="without inputs"):
        checkpoint(tf.tanh)()


@pytest.mark.parametrize(
    "part",
    [lambda x, w: x @ w, lambda x, w: tf.nn.dropout(x, 0.5), lambda x, w: tf.tanh(x @ w)],
    ids=["a product", "a dropout", "policy"],
)
def test_where_nothing_is_saved_the_part_is_called_as_it_is(part, ws):
    policy = (lambda op: True) if part.__code__.co_names == ("tf", "tanh") else None
    x, w = tf.Variable(x_of()), tf.Variable(ws[0])

    def run(call):
        tf.random.set_seed(1)
        with tf.GradientTape() as tape:
            y = call(part, x, w)
        return y, tape.gradient(y, x)

    with pytest.warns(UserWarning, match="saves nothing of .*lambda"):
        ours = run(functools.partial(checkpoint, policy=policy))
    assert_close(ours, run(plainly))


def test_options_of_pytorch_are_named():
    x = tf.ones((8, 8))
    with pytest.raises(TypeError, match="checkpoint has no option 'use_reentrant'"):
        checkpoint(tf.tanh, x, use_reentrant=False)
    # One that the part takes is the part's.
    assert checkpoint(lambda x, debug: x if debug else -x, x, debug=True)[0, 0] == 1
