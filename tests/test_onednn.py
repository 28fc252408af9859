"""The configuration that most users have: oneDNN's kernels and fusions, all threads.

In a process of its own: oneDNN is chosen when TensorFlow is loaded.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.measured

MODELS = [
    "chain",
    "resnet20",
    "unet with biases",
    "gpt",
    "bert",
    "mobilenet",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("densenet", "inception")),
]


@pytest.mark.parametrize("name", [*MODELS, "pooling"])
@pytest.mark.sweep(3)
def test_a_default_session_takes_what_was_predicted(name):
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_onednn", name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def pooling(shape, pool):
    """The measured and the predicted peak of layers of pooling, plain and planned."""
    import tensorflow as tf

    from memory_saving_gradients import get_plans, gradients_memory, measure

    v1, peaks = tf.compat.v1, []
    for differentiate in (tf.gradients, gradients_memory):
        with tf.Graph().as_default() as graph:
            h = x = v1.placeholder(tf.float32, shape)
            weights = [tf.Variable(tf.ones(32)) for _ in range(4)]
            for w in weights:
                h = pool(h * w, 3, 1, "SAME")
            grads = differentiate(tf.reduce_sum(h**2), weights)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                feed = {x: np.ones(shape)}
                session.run(grads, feed)
                peaks.append(measure.session_peak(session, grads, feed))
            plans = get_plans(graph)
    assert peaks == pytest.approx([plans[0].baseline_peak_bytes, plans[0].peak_bytes], rel=0.01)


def poolings():
    """oneDNN keeps where the maxima are, a byte per element."""
    import tensorflow as tf

    pooling((16, 32, 32, 32), tf.nn.max_pool2d)
    pooling((16, 16, 8, 8, 32), tf.nn.max_pool3d)


def main(name):
    import functools

    import tensorflow as tf

    from memory_saving_gradients import BudgetError, get_plans, gradients, measure
    from memory_saving_gradients.graph.tf_private import onednn_enabled
    from test_models import DenseNet, Inception, MobileNet, UNet, build_v1
    from tests.cases import MODELS
    from tests.rewriting.test_rehearsal import Attention

    class BiasedUNet(UNet):
        """Convolutions with biases, whose gradients oneDNN merges with those of the kernels."""

        def batch_norm(self, x, name, momentum=0.9):
            return tf.nn.bias_add(x, self.parameter(f"{name}/bias", (int(x.shape[-1]),)))

    assert onednn_enabled()
    v1 = tf.compat.v1
    make, batch = {
        "unet with biases": (lambda: BiasedUNet(size=64, width=16, levels=2), 16),
        "bert": (functools.partial(Attention, erf=True), 16),
        "densenet": (DenseNet, 16),
        "mobilenet": (functools.partial(MobileNet, 64), 16),
        "inception": (functools.partial(Inception, 64), 16),
    }.get(name) or MODELS[name]
    ways = {
        "plain": tf.gradients,
        "memory": functools.partial(gradients, checkpoints="memory"),
        "speed": functools.partial(gradients, checkpoints="speed"),
        **{f"{s:g}": functools.partial(gradients, memory_budget=s) for s in (0.7, 0.5, 0.3)},
    }
    peaks, values, plans, plain_runs = {}, {}, {}, []
    for way, differentiate in ways.items():
        model = make()
        with tf.Graph().as_default() as graph:
            step = build_v1(model, batch)
            try:
                grads = differentiate(step.loss, step.variables)
            except BudgetError:
                if way == "0.3":
                    continue
                raise
            fetches = tf.nest.flatten(grads, expand_composites=True)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                feed = step.feed(model.example(batch))
                values[way] = session.run(fetches, feed)
                # What nothing orders, as in the plain step, takes another course in each run.
                runs = [measure.session_peak(session, fetches, feed) for _ in range(5)]
                peaks[way] = np.median(runs) if way == "plain" else max(runs)
                plain_runs = runs if way == "plain" else plain_runs
            plans[way] = get_plans(graph)
    plain = plans["memory"][0].baseline_peak_bytes
    print({way: (peaks[way], [p.peak_bytes for p in plans[way]] or plain) for way in peaks})
    assert 0.9 * min(plain_runs) <= plain <= 1.1 * max(plain_runs)
    # Batch norm at random initialisation amplifies rounding.
    tolerance = 0.05 if name in ("resnet20", "densenet", "mobilenet", "inception") else 1e-4
    for way in list(peaks)[1:]:
        for plan in plans[way]:
            # Known to be missed by 7 % on some processors: see the limits in docs/supported.md.
            off = 0.08 if (name, way) == ("bert", "speed") else 0.05
            assert plan.peak_bytes == pytest.approx(peaks[way], rel=off), way
            assert plan.budget_bytes is None or peaks[way] <= 1.02 * plan.budget_bytes
        for a, b in zip(values[way], values["plain"], strict=True):
            error = np.linalg.norm(np.subtract(a, b)) / max(np.linalg.norm(b), 1e-12)
            assert error <= tolerance, (way, error)
    assert peaks["memory"] < 0.75 * peaks["plain"]


if __name__ == "__main__":
    poolings() if sys.argv[1] == "pooling" else main(sys.argv[1])
