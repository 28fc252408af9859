"""The options of a front door: checked on their own, and then against a graph."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import tensorflow as tf

from memory_saving_gradients.graph.devices import check_device, usual
from memory_saving_gradients.graph.shapes import NOTHING_GIVEN, InputSizes
from memory_saving_gradients.options.budgets import OfDevice, parse_budget
from memory_saving_gradients.options.checkpoints_argument import (
    Checkpoints,
    check_checkpoints,
    is_empty_collection,
    resolve,
)
from memory_saving_gradients.planning.search import UNBOUNDED
from memory_saving_gradients.planning.strategies import STRATEGIES
from memory_saving_gradients.plans.plan import Plan

BatchSize: TypeAlias = int | Mapping[str, Sequence[int]] | None


class MoreOptions(TypedDict, total=False):
    """The options of all front doors besides `checkpoints` and `memory_budget`; see `gradients`."""

    max_overhead: float | None
    max_recompute: int | None
    plan: Plan | str | os.PathLike[str] | None
    plan_cache: str | os.PathLike[str] | None
    device: str | None
    cost_model: str
    batch_size: BatchSize
    verify: bool
    running_sums: bool
    pieces: bool | int


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan for one graph.

    Attributes:
        strategy: a name in `STRATEGIES`; "collection", "list" or "policy"; "budget" or "overhead"
            if only that is given; or "plan".
        kept: the tensors to keep; None for a strategy that chooses by itself.
        budget: bytes (int), a share of the baseline peak (float), a share of the device, or None
            for no budget.
        max_overhead: the extra cost allowed, as a share of the plain step's; None for any.
        most_runs: how often an op may run.
        plan: the plan to apply; all other options are then ignored.
        plan_cache: the folder where plans are cached; None for none.
        device: the device to estimate costs for.
        cost_model: "analytical" or "measured".
        sizes: what is known of the shapes of the inputs.
        verify: whether to measure the peak of a run.
        running_sums: whether to replace long sums of gradients by running sums.
        pieces: whether regions may run in pieces, or in how many the largest one does; None where
            that is not even advised.
    """

    strategy: str
    kept: list[tf.Tensor] | None
    budget: int | float | OfDevice | None = None
    max_overhead: float | None = None
    most_runs: int = UNBOUNDED
    plan: Plan | None = None
    plan_cache: Path | None = None
    device: str = "cpu"
    cost_model: str = "analytical"
    sizes: InputSizes = NOTHING_GIVEN
    verify: bool = False
    running_sums: bool = True
    pieces: bool | int | None = None

    @property
    def in_pieces(self) -> bool:
        """Whether regions may run in pieces."""
        return bool(self.plan.pieces if self.plan else self.pieces)

    @property
    def advised(self) -> bool:
        """Whether the user is told what pieces would give."""
        return self.pieces is False and self.plan is None


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a front door; see `gradients` for their meaning.

    Raises:
        TypeError: an option is of a wrong type.
        ValueError: an option has a value that is invalid for any graph.
    """

    checkpoints: Checkpoints = "collection"
    memory_budget: int | str | float | None = None
    max_overhead: float | None = None
    max_recompute: int | None = None
    plan: Plan | str | os.PathLike[str] | None = None
    plan_cache: str | os.PathLike[str] | None = None
    device: str | None = None
    cost_model: str = "analytical"
    batch_size: BatchSize = None
    verify: bool = False
    running_sums: bool = True
    pieces: bool | int = False

    @classmethod
    def beside_memory(
        cls,
        checkpoints: Checkpoints,
        memory_budget: int | str | float | None,
        **more: Unpack[MoreOptions],
    ) -> Options:
        """The options of a front door whose default is "memory", which a plan overrides."""
        if (
            more.get("plan") is not None
            and isinstance(checkpoints, str)
            and checkpoints == "memory"
        ):
            checkpoints = "collection"
        return cls(checkpoints, memory_budget, **more)

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.cost_model not in ("analytical", "measured"):
            raise ValueError(
                f'cost_model must be "analytical" or "measured", got {self.cost_model!r}'
            )
        if self.plan is not None:
            asked = self.memory_budget is not None or self.max_overhead is not None
            if asked or not self._says("collection"):
                raise ValueError(
                    "a plan decides everything: leave out checkpoints, memory_budget and "
                    "max_overhead"
                )
            if not isinstance(self.plan, Plan | str | os.PathLike):
                raise TypeError(
                    f"plan must be a Plan or the path of a saved one, got {self.plan!r}"
                )
        if self.plan_cache is not None and not isinstance(self.plan_cache, str | os.PathLike):
            raise TypeError(f"plan_cache must be the path of a folder, got {self.plan_cache!r}")
        if self.memory_budget is not None:
            parse_budget(self.memory_budget)
            if self.max_overhead is not None:
                raise ValueError(
                    "memory_budget asks for the least overhead within a number of bytes, and "
                    "max_overhead for the fewest bytes within an overhead: give one of them"
                )
        elif self.max_overhead is not None:
            _check_overhead(self.max_overhead)
        elif self.max_recompute is not None and not any(map(self._says, STRATEGIES)):
            raise ValueError(
                "max_recompute limits a strategy, a memory_budget or a max_overhead: give one of "
                f"these, not only checkpoints={self.checkpoints!r}"
            )
        _most_runs(self.max_recompute)
        _check_pieces(self.pieces)
        _sizes(self.batch_size)
        check_checkpoints(self.checkpoints)

    def _says(self, strategy: str) -> bool:
        return isinstance(self.checkpoints, str) and self.checkpoints == strategy

    def request(self, forward: dict[str, tf.Operation], graph: tf.Graph) -> Request:
        """The request that the options make for a graph.

        Args:
            forward: the forward graph, from `forward_operations`.
            graph: the graph that is differentiated.

        Raises:
            ValueError: a checkpoint is not in the forward graph, `batch_size` names a tensor that
                is no input, or a file holds no plan.
        """
        sizes = _sizes(self.batch_size)
        for name, _ in sizes.shapes:
            if getattr(forward.get(name), "type", None) != "Placeholder":
                inputs = [op.name for op in forward.values() if op.type == "Placeholder"]
                raise ValueError(
                    f'batch_size names "{name}", which is no input of what is differentiated; its '
                    f"inputs are {inputs}"
                )
        request = Request(
            "plan",
            None,
            most_runs=_most_runs(self.max_recompute),
            plan_cache=None if self.plan_cache is None else Path(self.plan_cache),
            device=self.device or usual(),
            cost_model=self.cost_model,
            sizes=sizes,
            verify=self.verify,
            running_sums=self.running_sums,
            pieces=self.pieces,
        )
        if self.plan is not None:
            plan = self.plan if isinstance(self.plan, Plan) else Plan.load(self.plan)
            if sizes.assumed and plan.batch_size is not None:
                request = dataclasses.replace(request, sizes=InputSizes(plan.batch_size))
            return dataclasses.replace(request, plan=plan)
        budgeted = self.memory_budget is not None
        if budgeted or self.max_overhead is not None:
            request = dataclasses.replace(
                request,
                budget=parse_budget(self.memory_budget) if budgeted else None,
                max_overhead=self.max_overhead,
            )
            free = self._says("memory") or self._says("auto")
            if free or is_empty_collection(self.checkpoints, graph):
                return dataclasses.replace(request, strategy="budget" if budgeted else "overhead")
        strategy, kept = resolve(self.checkpoints, forward, graph)
        return dataclasses.replace(request, strategy=strategy, kept=kept)


def _sizes(batch_size: BatchSize) -> InputSizes:
    """The sizes that the option `batch_size` gives; see `gradients`."""
    if batch_size is None:
        return InputSizes(assumed=True)
    if not isinstance(batch_size, Mapping):
        return InputSizes(_size(batch_size))
    shapes = {}
    for name, sizes in batch_size.items():
        if not isinstance(name, str) or isinstance(sizes, str) or not isinstance(sizes, Sequence):
            raise TypeError(
                "batch_size must be an int, or map names of inputs to whole shapes such as "
                f"(8, 256), got {name!r}: {sizes!r}"
            )
        shapes[name.partition(":")[0]] = tuple(map(_size, sizes))
    return InputSizes(shapes=tuple(shapes.items()))


def _check_overhead(value: Any) -> None:
    """Raises if `max_overhead` is invalid."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"max_overhead must be a float, the extra cost as a share of the step's, got {value!r}"
        )
    if not 0 < float(value) <= _MOST_OVERHEAD:
        hint = f" Did you mean {float(value) / 100}?" if float(value) > _MOST_OVERHEAD else ""
        raise ValueError(
            "max_overhead must be above 0 and up to "
            f"{_MOST_OVERHEAD}, such as 0.1 for a tenth of the step's cost, got {value!r}.{hint}"
        )


# A larger value is probably meant in percent.
_MOST_OVERHEAD = 4


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"batch_size must be an int, or map names to shapes, got {value!r}")
    if value < 1:
        raise ValueError(f"batch_size must be at least 1, got {value}")
    return int(value)


def _check_pieces(pieces: Any) -> None:
    """Raises if `pieces` is invalid."""
    if not isinstance(pieces, bool | int):
        raise TypeError(f"pieces must be a bool or the number of pieces, an int, got {pieces!r}")
    if not isinstance(pieces, bool) and pieces < _FEWEST_PIECES:
        raise ValueError(f"pieces must be True, False or at least {_FEWEST_PIECES}, got {pieces}")


_FEWEST_PIECES = 2


def _most_runs(max_recompute: int | None) -> int:
    """How often an op may run, given the option `max_recompute`."""
    if max_recompute is None:
        return UNBOUNDED
    if isinstance(max_recompute, bool) or not isinstance(max_recompute, int):
        raise TypeError(f"max_recompute must be an int or None, got {max_recompute!r}")
    if max_recompute < 1:
        raise ValueError(f"max_recompute must be at least 1, got {max_recompute}")
    return max_recompute + 1
