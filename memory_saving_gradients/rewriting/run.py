"""The entries of a schedule as ops and copies, and the interface of what delays them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph.gate import Gate

#: The suffix of the names of copies; a number may follow.
COPY = "/recomputed"


@dataclasses.dataclass(frozen=True)
class Run:
    """One entry of a schedule: an op, or a copy of it."""

    op: tf.Operation
    copy: str | None
    in_backward: bool


class Holding(abc.ABC):
    """How the ops of a schedule are delayed; created from the plain step, before any edit.

    Attributes:
        gates: the gates, each by the place of the schedule that it comes before; later ops read
            through it.
    """

    gates: Mapping[int, Gate]

    @abc.abstractmethod
    def hold(self, runs: Sequence[Run], copies: Mapping[str, tf.Operation]) -> None:
        """Makes the runs of the backward pass follow the schedule.

        Args:
            runs: the entries of the schedule.
            copies: the copies, by the names in `runs`.
        """
