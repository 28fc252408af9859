"""The peak of a step in a process: tensors of any size are seen, with oneDNN and without."""

import pytest
import tensorflow as tf

from memory_saving_gradients.measure import function_peak

pytestmark = pytest.mark.measured


def make_chain(kib, count):
    """A step that keeps `count` tensors of `kib` KiB for its gradient."""
    x = tf.random.normal((kib * 256,))

    @tf.function
    def step():
        h = x
        for _ in range(count):
            h = tf.tanh(h * 1.5)
        return tf.gradients(h, x)

    return step


@pytest.mark.parametrize(("kib", "count"), [(98, 400), (1000, 40)])
@pytest.mark.parametrize("onednn", ["0", "1"])
def test_tensors_of_any_size_are_measured(monkeypatch, onednn, kib, count):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", onednn)
    expected = kib * 1024 * count
    assert function_peak(make_chain, kib, count) == pytest.approx(expected, rel=0.1)
