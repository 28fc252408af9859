"""The rewritten step rounds as the plain one does, with all of Grappler's optimisers on."""

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg

#: What networks are made of, as Grappler rewrites it: name -> function.
ACTIVATIONS = {
    "gelu": tf.nn.gelu,
    "swish": tf.nn.swish,
    "hard swish": lambda h: h * tf.nn.relu6(h + 3.0) / 6.0,
    "scaled gate": lambda h: 2.0 * h * tf.sigmoid(h),
    "mish": lambda h: h * tf.tanh(tf.nn.softplus(h)),
    "same tensor twice": lambda h: tf.sin(h) * tf.sin(h),
    "residuals": lambda h: h + 0.5 * tf.tanh(h),
    "normalised": lambda h: (
        1.5
        * (h - tf.reduce_mean(h, -1, keepdims=True))
        * tf.math.rsqrt(tf.math.reduce_variance(h, -1, keepdims=True) + 1e-3)
        + 0.1
    ),
    "squeeze and excite": lambda h: h * tf.sigmoid(tf.reduce_mean(h, 0, keepdims=True)) * 1.5,
}


def step(activation, make_tape):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((8, 64, 64)).astype(np.float32) / 8
    weights = [tf.Variable(v) for v in values]
    bias = [tf.Variable(v[0]) for v in values]

    @tf.function(autograph=False)
    def run(x):
        with make_tape() as tape:
            h = x
            for w, b in zip(weights, bias, strict=True):
                h = activation(h @ w + b)
            loss = tf.reduce_sum(h)
        return loss, tape.gradient(loss, [*weights, *bias])

    x = tf.constant(rng.standard_normal((512, 64)).astype(np.float32))
    results = run(x)
    return results, msg.get_plans(run.get_concrete_function(x).graph)


def largest_difference(activation):
    (plain, _), (ours, plans) = (
        step(activation, tf.GradientTape),
        step(activation, msg.GradientTape),
    )
    assert plans
    pairs = zip(tf.nest.flatten(ours), tf.nest.flatten(plain), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_rounded_as_in_the_plain_step(name):
    assert largest_difference(ACTIVATIONS[name]) == 0


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "activation",
    [
        lambda h: tf.nn.gelu(h, approximate=True),
        lambda h: 0.1 * h**3,
        lambda h: 0.01 * h**3 + 0.02 * h * h + 0.5 * h,
    ],
)
def test_a_power_in_both_passes_differs_by_rounding_alone(activation):
    assert largest_difference(activation) < 1e-6


def test_grappler_optimises_a_step_with_powers(capfd):
    step(lambda h: 0.1 * h**3, msg.GradientTape)
    assert "optimization failure" not in capfd.readouterr().err
