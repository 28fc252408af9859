"""The partial sums of long matrix products in XLA:GPU.

If a product has too few elements to occupy the GPU, XLA multiplies several parts of the long rows
at once, writes out the partial sums, and adds them up ("split-k"). Into how many parts is decided
by an estimate of the time. Its formula differs between versions of XLA (see `splitk_rewriter.cc`
there). The one here is fitted to what the compiler of jax 0.10.2 makes of 280 products for an H100,
and right for 273 of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from memory_saving_gradients.graph.devices import Device, multiprocessors

#: The attribute that says whether the first operand is transposed.
_FIRST_TRANSPOSED = {
    "MatMul": "transpose_a",
    "BatchMatMul": "adj_x",
    "BatchMatMulV2": "adj_x",
    "BatchMatMulV3": "adj_x",
}

#: Matrix products.
PRODUCTS = frozenset(_FIRST_TRANSPOSED)

_PARTS = tuple(2**power for power in range(8))

# A multiprocessor computes tiles of so many rows and columns. The unit of time is that of one more
# multiplication for each element of a tile.
_TILE = 128
_TO_BEGIN = 64
_TO_ADD, _TO_ADD_A_TILE = 48, 3.9


def partial_sums(op: tf.Operation, shape: Callable[[tf.Tensor], Sequence[int]], gpu: Device) -> int:
    """Bytes of the partial sums of a matrix product; 0 if it is made at once, and for other ops.

    Args:
        op: the op.
        shape: gives the shape of a tensor.
        gpu: the GPU.
    """
    if op.type not in PRODUCTS:
        return 0
    product = op.outputs[0]
    *batch, rows, columns = shape(product)
    length = shape(op.inputs[0])[-2 if op.get_attr(_FIRST_TRANSPOSED[op.type]) else -1]
    parts = number_of_parts(math.prod(batch), rows, columns, length, multiprocessors(gpu))
    size = max(product.dtype.size, tf.float32.size)
    return 0 if parts == 1 else parts * math.prod(batch) * rows * columns * size


def number_of_parts(batch: int, rows: int, columns: int, length: int, multiprocessors: int) -> int:
    """Into how many parts XLA:GPU splits the rows of matrix products.

    Args:
        batch: how many products.
        rows: of the first operand.
        columns: of the second operand.
        length: of the rows and columns that are multiplied.
        multiprocessors: of the GPU.
    """
    of_tile = min(rows, _TILE) * min(columns, _TILE) / _TILE**2
    tiles = batch * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)

    def time(parts: int) -> float:
        in_turn = max(1.0, parts * tiles * of_tile / multiprocessors)
        multiplying = of_tile * in_turn * (length / parts + _TO_BEGIN)
        if parts == 1:
            return multiplying
        return multiplying + _TO_ADD + _TO_ADD_A_TILE * parts * batch * rows * columns / _TILE**2

    return min(_PARTS, key=time)
