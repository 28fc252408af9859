"""What the package does to TensorFlow by private names."""

import tensorflow as tf

from memory_saving_gradients import checkpoint


def test_autograph_converts_nothing_of_the_package():
    """Not even what is an argument of a function, which gets it without its decorators."""

    @tf.function
    def step(call, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(lambda x: tf.sin(tf.tanh(x)), x)
        return tape.gradient(y, x)

    x = tf.ones((8, 8))
    expected = tf.cos(tf.tanh(x)) * (1 - tf.tanh(x) ** 2)
    tf.debugging.assert_near(step(checkpoint, x), expected)
