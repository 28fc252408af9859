"""What `checkpoint()` saves, in real runs and as compiled."""

import functools

import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients import checkpoint
from memory_saving_gradients.measure import compiled_temporaries, function_peak
from tests.parts import POLICIES, assert_close, plainly, weights, x_of

BLOCKS, ROWS, WIDE = 12, 2048, 128


def make_eager_step(around):
    """A deep eager network in blocks; `around` stands around each."""
    initial = tf.random.stateless_normal((BLOCKS, WIDE, WIDE), (1, 2), stddev=0.1)
    weights = [tf.Variable(w) for w in tf.unstack(initial)]
    x = tf.random.stateless_normal((ROWS, WIDE), (3, 4))

    def block(x, w):
        for _ in range(4):
            x = tf.nn.dropout(tf.tanh(tf.sin(x) @ w), 0.1)
        return x

    def step():
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                if around == "checkpoint":
                    h = checkpoint(block, h, w)
                elif around == "recompute_grad":
                    h = tf.recompute_grad(block)(h, w)
                else:
                    h = block(h, w)
            loss = tf.reduce_mean(h)
        return tape.gradient(loss, weights)

    return step if around != "function" else tf.function(step)


@pytest.mark.measured
def test_an_eager_step_takes_less_memory():
    ours, plain = (function_peak(make_eager_step, how) for how in ("checkpoint", "plain"))
    assert ours < 0.25 * plain
    masks = BLOCKS * 4 * ROWS * WIDE  # that draws them anew, so its gradients are wrong
    assert ours - masks < 1.05 * function_peak(make_eager_step, "recompute_grad")


def make_recurrent_step(around, in_a_function):
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.LSTM(64, return_sequences=True) for _ in range(3)]
    x = tf.random.normal((32, 64, 64))
    for layer in layers:
        layer.build(x.shape)
    weights = [v.value for layer in layers for v in layer.trainable_variables]

    def step():
        with tf.GradientTape() as tape:
            h = x
            for layer in layers:
                h = checkpoint(layer, h) if around == "checkpoint" else layer(h)
            loss = tf.reduce_mean(h**2)
        return tape.gradient(loss, weights)

    return tf.function(step) if in_a_function else step


@pytest.mark.parametrize("in_a_function", [False, True], ids=["eager", "function"])
@pytest.mark.measured
def test_loops_keep_no_more_than_first_derivatives_need(in_a_function):
    ours, plain = (
        function_peak(make_recurrent_step, how, in_a_function) for how in ("checkpoint", "plain")
    )
    assert ours < (0.8 if in_a_function else 0.4) * plain


@pytest.mark.parametrize("policy", POLICIES)
def test_xla_does_not_merge_the_parts_that_run_again(policy):
    weights = [tf.Variable(tf.eye(WIDE)) for _ in range(8)]

    def compiled(call):
        @tf.function(jit_compile=True)
        def step(x):
            with tf.GradientTape() as tape:
                for w in weights:
                    x = call(lambda x, w: tf.sin(tf.tanh(tf.sin(tf.tanh(x @ w)) @ w)), x, w)
                loss = tf.reduce_sum(x)
            return tape.gradient(loss, weights)

        return compiled_temporaries(step, tf.TensorSpec((ROWS, WIDE)))

    ours = compiled(functools.partial(checkpoint, policy=POLICIES[policy]))
    assert ours < (0.75 if policy == "none" else 0.95) * compiled(plainly)


def test_beside_a_strategy_of_ours():
    """The part is one op to the plan, which recomputes what is around it."""
    ws = weights()

    def network(call, x):
        for w in ws:
            x = tf.sin(tf.tanh(tf.sin(tf.tanh(x @ w))))
            x = call(lambda x, w: tf.tanh(tf.sin(x @ w)), x, w)
        return tf.reduce_sum(x)

    def run(make_tape, call):
        @tf.function(autograph=False)
        def step(x):
            with make_tape() as tape:
                y = network(call, x)
            return tape.gradient(y, ws)

        x = x_of(rows=4096)
        return step(x), msg.get_plans(step.get_concrete_function(x).graph)

    ours, (plan,) = run(functools.partial(msg.GradientTape, checkpoints="memory"), checkpoint)
    assert plan.recomputed
    assert_close(ours, run(tf.GradientTape, plainly)[0])
