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


def make_two_chains(kib, count):
    """A step that keeps tensors of one size, and then, when these are gone, of another."""
    sizes = (*zip(kib, count, strict=True),)
    x = [tf.random.normal((each * 256,)) for each in kib]

    @tf.function
    def step():
        total = tf.zeros(())
        for (_, times), h in zip(sizes, x, strict=True):
            begin = h = h + total
            for _ in range(times):
                h = tf.tanh(h * 1.5)
            total = tf.reduce_sum(tf.gradients(h, begin)[0])
        return total

    return step


def test_small_tensors_and_large_ones_at_other_times_are_not_added(monkeypatch):
    """oneDNN's allocator keeps them apart: each kind has a peak of its own."""
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    peak = function_peak(make_two_chains, (98, 1000), (400, 40))
    assert peak == pytest.approx(1024 * 1000 * 40, rel=0.15)
