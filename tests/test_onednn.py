"""With oneDNN's kernels and fusions on, in a process of its own, as on many users' machines."""

import os
import subprocess
import sys

import numpy as np
import pytest


@pytest.mark.parametrize("name", ["chain", "resnet20", "unet with biases", "gpt"])
def test_onednn_on(name):
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_onednn", name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def main(name):
    import tensorflow as tf

    from memory_saving_gradients import get_plans, gradients_memory, gradients_speed, measure
    from memory_saving_gradients.graph.tf_private import onednn_enabled
    from test_models import UNet, build_v1
    from tests.cases import MODELS

    class BiasedUNet(UNet):
        """Convolutions with biases, whose gradients oneDNN merges with those of the kernels."""

        def batch_norm(self, x, name, momentum=0.9):
            return tf.nn.bias_add(x, self.parameter(f"{name}/bias", (int(x.shape[-1]),)))

    assert onednn_enabled()
    v1 = tf.compat.v1
    make, batch = MODELS.get(name, (lambda: BiasedUNet(size=64, width=16, levels=2), 16))
    peaks, values = {}, {}
    for differentiate in (tf.gradients, gradients_memory, gradients_speed):
        model = make()
        with tf.Graph().as_default() as graph:
            step = build_v1(model, batch)
            grads = differentiate(step.loss, step.variables)
            fetches = tf.nest.flatten(grads, expand_composites=True)
            config = v1.ConfigProto(inter_op_parallelism_threads=4)
            with v1.Session(config=config) as session:
                session.run(v1.global_variables_initializer())
                feed = step.feed(model.example(batch))
                values[differentiate] = session.run(fetches, feed)
                peaks[differentiate] = measure.session_peak(session, fetches, feed)
            assert differentiate is tf.gradients or get_plans(graph)
    # Batch norm at random initialisation amplifies rounding.
    tolerance = 0.05 if name == "resnet20" else 1e-4
    for ours in (gradients_memory, gradients_speed):
        for a, b in zip(values[ours], values[tf.gradients], strict=True):
            error = np.linalg.norm(np.subtract(a, b)) / max(np.linalg.norm(b), 1e-12)
            assert error <= tolerance, error
    print({ours.__name__: peak for ours, peak in peaks.items()})
    assert peaks[gradients_memory] < 0.85 * peaks[tf.gradients]


if __name__ == "__main__":
    main(sys.argv[1])
