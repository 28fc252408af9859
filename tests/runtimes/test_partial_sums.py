"""The partial sums of matrix products in XLA:GPU."""

import pytest
import tensorflow as tf

from memory_saving_gradients.graph.devices import described
from memory_saving_gradients.runtimes.partial_sums import number_of_parts, partial_sums

#: By rows, columns and length, the parts into which XLA splits a product for an H100: see
#: tests/proving/test_described_gpu.py.
PARTS = {
    (64, 64, 256): 8,
    (256, 256, 2048): 16,
    (512, 256, 256): 4,
    (768, 768, 4096): 4,
    (1024, 256, 2048): 8,
    (2048, 256, 1024): 4,
    (2048, 1024, 8192): 1,
    (4096, 256, 1024): 1,
}


@pytest.mark.parametrize("sizes", PARTS)
def test_number_of_parts(sizes):
    assert number_of_parts(1, *sizes, multiprocessors=132) == PARTS[sizes]


def bytes_of(product):
    return partial_sums(product.op, lambda tensor: tensor.shape.as_list(), described("h100"))


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_partial_sums_have_the_precision_of_float32(graph, dtype):
    x, dy = tf.zeros((2048, 256), dtype), tf.zeros((2048, 256), dtype)
    assert bytes_of(tf.matmul(x, dy, transpose_a=True)) == 16 * 256 * 256 * 4
    assert bytes_of(tf.matmul(x, dy, transpose_b=True)) == 0
    assert bytes_of(x + dy) == 0


def test_many_products_at_once_are_not_split(graph):
    x = tf.zeros((64, 2048, 256))
    assert bytes_of(tf.matmul(x, x, transpose_a=True)) == 0
    assert bytes_of(tf.matmul(x[:2], x[:2], transpose_a=True)) == 8 * 2 * 256 * 256 * 4
