"""What `fed_batch` makes of all that `fit` takes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients.doors.feeding import fed_batch

ROWS = np.zeros((100, 8), "float32")


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"a": ROWS[:30]}, ROWS[:30]


def generated():
    for _ in range(4):
        yield ROWS[:25], ROWS[:25]


DATASET = tf.data.Dataset.from_tensor_slices((ROWS, ROWS))


@pytest.mark.parametrize(
    ("x", "batch_size", "expected"),
    [
        (ROWS, None, 32),
        (ROWS, 64, 64),
        (ROWS, 1000, 100),
        (ROWS[:7], None, 7),
        (tf.constant(ROWS), 50, 50),
        ([ROWS, ROWS], 64, 64),
        ({"a": ROWS}, 64, 64),
        (DATASET.batch(40), None, 40),
        (DATASET.batch(40, drop_remainder=True), None, 40),
        (DATASET.map(lambda a, b: ({"a": a}, b)).padded_batch(16).prefetch(2), None, 16),
        (generated(), None, 25),
        (Sequence(), None, 30),
        (None, None, None),
        (DATASET.take(0).batch(4), None, None),
        (iter(()), None, None),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, int) else str(one),
)
def test_the_batch_is_known(x, batch_size, expected):
    assert fed_batch(x, batch_size)[1] == expected


def test_nothing_of_a_generator_is_lost():
    again, batch = fed_batch(generated(), None)
    assert batch == 25
    assert len(list(again)) == 4
