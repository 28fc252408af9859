"""Trains on several machines, each worker in less memory: an example to start from.

Start it on every machine with the same list of addresses and that machine's own index:

    TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
                "task": {"type": "worker", "index": 0}}' python -m scripts.several_machines

Without TF_CONFIG it trains on this machine alone.
"""

from __future__ import annotations

import argparse
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import memory_saving_gradients as msg


def data(batch: int) -> tf.data.Dataset:
    """Noisy images of ten colours; put your own in their place."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 8 * batch).astype(np.int32)
    images = rng.standard_normal((10, 1, 1, 3))[labels] + rng.standard_normal((32, 32, 3))
    images = images.astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch).repeat()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128, help="of all workers together")
    parser.add_argument("--depth", type=int, default=20, help="convolutions")
    parser.add_argument("--width", type=int, default=32, help="channels")
    options = parser.parse_args()

    # Before anything else of TensorFlow: it connects the workers.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        draw = tf.random.Generator.from_seed(0)
        widths = [3, *[options.width] * options.depth]
        filters = [
            tf.Variable(draw.normal((3, 3, before, after), stddev=(2 / (9 * before)) ** 0.5))
            for before, after in itertools.pairwise(widths)
        ]
        head = tf.Variable(tf.zeros((options.width, 10)))
    batches = iter(strategy.experimental_distribute_dataset(data(options.batch)))

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with msg.GradientTape() as tape:  # the one line that is not plain TensorFlow
            x = images
            for weights in filters:
                y = tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))
                x = x + 0.1 * y if x.shape == y.shape else y
            logits = tf.reduce_mean(x, (1, 2)) @ head
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=options.batch)
        grads = tape.gradient(loss, [*filters, head])
        replica = tf.distribute.get_replica_context()
        grads = replica.all_reduce(tf.distribute.ReduceOp.SUM, grads)
        for variable, grad in zip([*filters, head], grads, strict=True):
            variable.assign_sub(0.01 * grad)
        return loss

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    for number in range(options.steps):
        images, labels = next(batches)
        loss = step(images, labels)
        if number == 0:
            graph = step.get_concrete_function(images, labels).graph
            print(*msg.get_plans(graph), sep="\n", flush=True)
        print(f"step {number}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
