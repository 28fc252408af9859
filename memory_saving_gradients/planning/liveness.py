"""How many bytes are alive at each moment: the one rule that every peak in this package is."""

from __future__ import annotations

import numpy as np


def alive(first: np.ndarray, last: np.ndarray, size: np.ndarray, count: int) -> np.ndarray:
    """The bytes alive at each moment.

    Args:
        first: by buffer, the first moment of its live range.
        last: by buffer, the last one; those that live longer may say `count`.
        size: by buffer, its bytes.
        count: how many moments there are.

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
