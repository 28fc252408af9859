"""Liveness: the bytes alive at each moment. Every peak in this package is computed by it."""

from __future__ import annotations

import numpy as np


def alive(first: np.ndarray, last: np.ndarray, size: np.ndarray, count: int) -> np.ndarray:
    """The bytes alive at each moment.

    Args:
        first: by buffer, the first moment of its live range.
        last: by buffer, the last one; `count` or more for a buffer that outlives all moments.
        size: by buffer, its bytes.
        count: the number of moments.

    Returns:
        Bytes, int64, of shape `[count]`.

    Example:
        >>> alive(np.array([0, 1]), np.array([1, 2]), np.array([4, 8]), 3).tolist()
        [4, 12, 8]
    """
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, np.minimum(last, count) + 1, size)
    return change[:count].cumsum()
