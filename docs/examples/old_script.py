"""A script of TensorFlow 1, as they were written: one line makes it save memory.

    python docs/examples/old_script.py

Nothing else is changed: placeholders, a session, an optimizer with `minimize`.
"""

import numpy as np
import tensorflow.compat.v1 as tf

import memory_saving_gradients

tf.disable_v2_behavior()
patched = memory_saving_gradients.patch()  # the one line

images = tf.placeholder(tf.float32, [None, 28, 28, 1], name="images")
labels = tf.placeholder(tf.int64, [None], name="labels")
training = tf.placeholder_with_default(True, [], name="training")

net = images
for i, filters in enumerate([16, 16, 32, 32, 64, 64]):
    with tf.variable_scope("conv%d" % i):  # noqa: UP031
        kernel = tf.get_variable("kernel", [3, 3, net.shape[-1], filters])
        offset = tf.get_variable("offset", [filters], initializer=tf.zeros_initializer())
        stride = 2 if i in (2, 4) else 1
        net = tf.nn.conv2d(net, kernel, [1, stride, stride, 1], "SAME")
        mean, variance = tf.nn.moments(net, [0, 1, 2])
        net = tf.nn.relu(tf.nn.batch_normalization(net, mean, variance, offset, None, 1e-3))
net = tf.nn.dropout(tf.reduce_mean(net, [1, 2]), rate=tf.cond(training, lambda: 0.5, lambda: 0.0))
logits = tf.matmul(net, tf.get_variable("head", [64, 10]))
loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)

random = np.random.RandomState(0)
x = random.standard_normal((256, 28, 28, 1)).astype("float32")
y = random.randint(0, 10, 256)

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for step in range(5):
        _, value = session.run([train, loss], {images: x, labels: y})
        print("step %d: loss %.4f" % (step, value))  # noqa: UP031

patched.plans[-1].summary()
