"""Decides which regions of a step run in pieces, and in how many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.pipeline import loops
from memory_saving_gradients.pipeline.decide import against_plain, decide, value
from memory_saving_gradients.planning.plan_data import PiecesPlan
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.reading.growing import regions_of
from memory_saving_gradients.reading.read import Reading
from memory_saving_gradients.reading.regions import Region, with_pieces

#: The number of pieces of each region that does not stay whole.
Counts: TypeAlias = dict[Region, int]

# A tensor is worth a region of its own from this share of the peak without pieces.
_LEAST = 0.04
# The numbers of pieces of the largest region that are tried; two pieces only for a budget.
_NUMBERS = (2, 4, 8, 16, 32, 64)
# The number of pieces for which advice is given.
_ADVISED = 16
# The plan says of so many tensors why they stay whole.
_FEW = 3
# More pieces are tried as long as they lower the peak to this share.
_LOWER = 0.9
# The most numbers of pieces that are tried on the graph, if a budget is missed.
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The regions of a step.

    Attributes:
        regions: the regions that can run in pieces, those of the largest tensors first.
        whole: why other large tensors stay whole, by name.
    """

    regions: list[Region]
    whole: dict[str, str]

    def plans(self, counts: Counts) -> tuple[PiecesPlan, ...]:
        """The regions as data for the plan."""
        able = (
            PiecesPlan(one.name, one.count, counts.get(one, 1), one.bytes, one.at_once)
            for one in self.regions
        )
        largest = [*self.whole.items()][:_FEW]
        return (*able, *(PiecesPlan(name, why=why) for name, why in largest))

    def ways(self, request: Request) -> Iterator[list[Counts]]:
        """The pieces to try, few first: of the regions that cost nothing, and then of all."""
        numbers: Sequence[int] = _NUMBERS if request.budget is not None else _NUMBERS[1:]
        if request.pieces is not True:
            numbers = [int(request.pieces or 0)]
        free = [region for region in self.regions if region.at_once]
        if free:
            yield [_counts(free, number) for number in numbers]
        if len(free) < len(self.regions):
            yield [_counts(self.regions, number) for number in numbers]


def choose(reading: Reading, request: Request) -> tuple[Pieces, list[Counts]]:
    """The regions of a step, and the pieces that serve a request best, as estimated.

    Returns:
        The regions; and their pieces, none if the step stays whole. For a budget, more pieces
        follow, to be tried if the first ones turn out to miss it.

    Raises:
        BudgetError: no number of pieces keeps the budget.
    """
    if request.plan:
        planned = {one.name: one.pieces for one in request.plan.pieces if one.pieces > 1}
        pieces = Pieces(*regions_of(reading, 1, planned))
        return pieces, [{region: planned[region.name] for region in pieces.regions}]
    whole = _tried(reading, {}, request)
    pieces = Pieces(*regions_of(reading, int(_LEAST * _lowest(whole))))
    if request.budget is None:
        return pieces, [_best(pieces, reading, request, whole)]
    if isinstance(whole, Plan):
        return pieces, [{}]
    errors = [whole]
    ways = [counts for scope in pieces.ways(request) for counts in scope]
    for i, counts in enumerate(ways):
        found = _tried(reading, counts, request)
        if isinstance(found, Plan):
            return pieces, ways[i : i + _TRIES]
        errors.append(found)
    raise min(errors, key=_lowest)


def _best(pieces: Pieces, reading: Reading, request: Request, whole: Plan | BudgetError) -> Counts:
    """The pieces that serve a request without a budget best."""
    best, chosen, cost = whole, Counts(), float(reading.problem.costs.sum())
    for scope in pieces.ways(request):
        before, most = _lowest(whole), max(map(len, scope))
        for counts in scope:
            found = _tried(reading, counts, request)
            if isinstance(best, BudgetError) or isinstance(found, BudgetError):
                continue
            if value(found, request, cost)[0] < _LOWER * value(best, request, cost)[0]:
                best, chosen = found, counts
            if len(counts) == most:
                if found.peak_bytes > _LOWER * before:
                    break
                before = found.peak_bytes
    return chosen


def advice(reading: Reading, request: Request, lowest: int) -> str:
    """A sentence on what pieces would give; empty if they would not lower the peak by much.

    Args:
        reading: the step.
        request: the request, without pieces.
        lowest: the lowest peak without pieces, in bytes.
    """
    pieces = Pieces(*regions_of(reading, int(_LEAST * lowest)))
    if not pieces.regions:
        return ""
    peak = _lowest(_tried(reading, _counts(pieces.regions, _ADVISED), request))
    if peak > _LOWER * lowest:
        return ""
    region = pieces.regions[0]
    return (
        f" pieces=True would give about {format_bytes(peak)}: what is computed row by row around "
        f'"{region.name}" ({format_bytes(region.bytes)}) can run on slices of the rows.'
    )


def predicted_plan(reading: Reading, request: Request) -> Plan:
    """The plan of a step that is not rewritten; the effect of pieces and loops is estimated.

    Raises:
        BudgetError: no plan within the budget was found.
    """
    if not request.in_pieces:
        return loops.predicted_plan(reading, request)
    pieces, (counts, *_) = choose(reading, request)
    if counts:
        plan = _planned(reading, counts, request)
        plan = against_plain(plan, reading, plan.problem)
    else:
        plan = loops.predicted_plan(reading, request)
    return dataclasses.replace(plan, pieces=pieces.plans(counts))


def _counts(regions: list[Region], number: int) -> Counts:
    """The pieces of each region if the largest has so many: pieces of others are no larger."""
    largest = max(region.bytes for region in regions)
    counts = {r: min(-(-r.bytes * number // largest), r.count) for r in regions}
    return {region: count for region, count in counts.items() if count > 1}


def _tried(reading: Reading, counts: Counts, request: Request) -> Plan | BudgetError:
    """The approximate plan of a step with these pieces, or the error if it misses the budget."""
    try:
        return _planned(reading, counts, request)
    except BudgetError as error:
        return error


def _lowest(found: Plan | BudgetError) -> int:
    """The lowest peak that was found, in bytes."""
    return found.peak_bytes if isinstance(found, Plan) else found.lowest_peak_bytes


def _planned(reading: Reading, counts: Counts, request: Request) -> Plan:
    """The approximate plan of a step with these pieces.

    Raises:
        BudgetError: no plan within the budget was found.
    """
    return decide(dataclasses.replace(reading, problem=with_pieces(reading, counts)), request)
