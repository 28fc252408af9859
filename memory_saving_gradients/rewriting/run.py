"""The entries of a schedule as ops and copies, and who makes them wait for one another."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph.gate import Gate

#: What the names of copies end in, before a number.
COPY = "/recomputed"


@dataclasses.dataclass(frozen=True)
class Run:
    """One entry of a schedule: an op, or a copy of it."""

    op: tf.Operation
    copy: str | None
    in_backward: bool


class Holding(abc.ABC):
    """How the ops of one schedule are made to wait; made of the plain step, before any edit.

    Attributes:
        gates: the gates that what comes later reads through, by the place in the schedule that
            each comes before.
    """

    gates: Mapping[int, Gate]

    @abc.abstractmethod
    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        """Makes the runs of the backward pass follow the schedule.

        Args:
            runs: the entries of the schedule.
            copies: the copies that they name.
        """
