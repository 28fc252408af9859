"""The ways to run the loops of a step that take the least time for their bytes.

What a round keeps, and what its gradient recomputes, is a minimum cut at a price for a second. A
few prices give the frontier between plain loops and those of the fewest bytes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import networkx as nx

from memory_saving_gradients.graph import kinds
from memory_saving_gradients.graph.loops import LoopPair, LoopWay
from memory_saving_gradients.reading.loop_sizes import LoopSizes, Ways

# The most ways of a level; how far apart two ways are at least, as a share of the bytes between the
# plain loops and those of the fewest, or as a factor; the rounds assumed where their number is
# unknown: so many that short segments are wrong; and the price of the way with the fewest bytes, as
# a share of what makes everything worth keeping: it only decides between ways of as many bytes.
_MOST_WAYS = 4
_APART = 0.05
_TIMES = 1.5
_MANY = 1000
_NEXT_TO_NOTHING = 1e-6
# Segments run again in shorter ones from so many rounds on.
_DEEP = 1_000
# Capacities are in these parts of a byte, as whole numbers: rounding would make cuts differ.
_PARTS = 2**20


#: Gives ways to run a loop at a price.
_Segments: TypeAlias = Callable[[LoopSizes, float, bool], Iterator[LoopWay]]


@dataclasses.dataclass(frozen=True)
class _Point:
    """A way to run loops: the bytes they hold and work with, and the seconds it takes longer."""

    ways: Ways
    bytes: int
    seconds: float


def frontier(
    sizes: Mapping[LoopPair, LoopSizes], cheap: bool = False, deep: bool = False
) -> list[Ways]:
    """Ways to run the loops of a step, from the plain loops to those of the fewest bytes.

    Args:
        sizes: the loops.
        cheap: whether no expensive op may run again.
        deep: whether segments of many rounds may run again in shorter ones, so every round three
            times.
    """
    sizes = {pair: _counted(each) for pair, each in sizes.items()}
    plain = _Point({}, sum(each.plain for each in sizes.values()), 0.0)
    levels = [_single, _long, *([_nested] if deep else [])]
    found = [point for level in levels for point in _corners(sizes, plain, level, cheap)]
    found.sort(key=lambda point: (point.bytes, point.seconds))
    apart = _APART * (plain.bytes - found[0].bytes)
    chosen: list[_Point] = []
    for point in filter(operator.attrgetter("ways"), found):
        if not chosen or (
            point.bytes >= min(chosen[-1].bytes + apart, chosen[-1].bytes * _TIMES)
            and point.seconds < chosen[-1].seconds
        ):
            chosen.append(point)
    return [plain.ways, *(point.ways for point in reversed(chosen))]


def _corners(
    sizes: Mapping[LoopPair, LoopSizes], plain: _Point, segments: _Segments, cheap: bool
) -> list[_Point]:
    """The corners of the convex hull of bytes and seconds below the plain loops.

    They are found by prices at which two known corners are worth the same (Eisner and Severance,
    "Mathematical techniques for efficient record segmentation in large shared databases", 1976).
    """
    seconds = sum(each.rounds * sum(each.seconds.values()) for each in sizes.values())
    lean = _at(sizes, _NEXT_TO_NOTHING * plain.bytes / max(seconds, 1e-300), segments, cheap)
    corners = [lean]
    gaps = [(plain, lean)]
    while gaps and len(corners) < _MOST_WAYS:
        left, right = gaps.pop(0)
        if left.bytes <= right.bytes or right.seconds <= left.seconds:
            continue
        price = (left.bytes - right.bytes) / (right.seconds - left.seconds)
        corner = _at(sizes, price, segments, cheap)
        if right.bytes < corner.bytes < left.bytes:
            corners.append(corner)
            gaps += [(left, corner), (corner, right)]
    return corners


def _counted(sizes: LoopSizes) -> LoopSizes:
    if sizes.counted:
        return sizes
    more = {number: each * _MANY // sizes.rounds for number, each in sizes.list_bytes.items()}
    return dataclasses.replace(sizes, rounds=_MANY, list_bytes=more)


def _at(
    sizes: Mapping[LoopPair, LoopSizes], price: float, segments: _Segments, cheap: bool
) -> _Point:
    """The best way for each loop at a price, in bytes for a second."""
    ways, held, seconds = {}, 0, 0.0
    for pair, each in sizes.items():
        best, taken = None, (each.plain, 0.0)
        for way in segments(each, price, cheap):
            now = each.held(way) + each.working(way), each.more_seconds(way)
            if now[0] + price * now[1] < taken[0] + price * taken[1]:
                best, taken = way, now
        if best:
            ways[pair] = best
        held += taken[0]
        seconds += taken[1]
    return _Point(ways, held, seconds)


def _single(sizes: LoopSizes, price: float, cheap: bool) -> Iterator[LoopWay]:
    """The best way to recompute single rounds, if any is recomputed."""
    kept = kept_at(price, sizes, 1, cheap)
    if len(kept) < len(sizes.pair.able):
        yield sizes.pair.way(1, kept)


def _long(sizes: LoopSizes, price: float, cheap: bool) -> Iterator[LoopWay]:
    """The best ways to recompute segments of several rounds, if anything is recomputed."""
    for way in _in_segments(sizes, price, cheap):
        root = math.sqrt(sizes.rounds * sizes.square(way))
        for every in {max(2, math.floor(root)), max(2, math.ceil(root))}:
            yield dataclasses.replace(way, every=every)


def _nested(sizes: LoopSizes, price: float, cheap: bool) -> Iterator[LoopWay]:
    """The best way to recompute segments in shorter ones, if there are many rounds."""
    many = sizes.counted and sizes.rounds >= _DEEP
    for way in _in_segments(sizes, price, cheap) if many else ():
        square = sizes.square(way)
        every = max(4, round((sizes.rounds**2 * square) ** (1 / 3)))
        within = max(2, round(math.sqrt(every * square)))
        yield dataclasses.replace(way, every=every, within=min(within, every // 2))


def _in_segments(sizes: LoopSizes, price: float, cheap: bool) -> Iterator[LoopWay]:
    """What segments of any length keep and recompute, if that is anything."""
    kept = kept_at(price, sizes, max(2, math.isqrt(sizes.rounds)), cheap)
    if len(kept) < len(sizes.pair.able):
        way = sizes.pair.way(2, kept)
        if way.start.states:  # else each round can be recomputed on its own
            yield way


def kept_at(price: float, sizes: LoopSizes, every: int, cheap: bool) -> frozenset[str]:
    """What a round keeps of its elements, so that bytes and seconds together cost the least.

    A minimum cut: a tensor that is needed is kept, for its bytes, or made, for the seconds of its
    op and with all that this op reads (as in the partitioner of AOTAutograd: "Min-cut optimal
    recomputation", He and Yu, 2022).

    Args:
        price: the bytes that a second is worth.
        sizes: the loop.
        every: the rounds of a segment, approximately.
        cheap: whether no expensive op may run again.

    Returns:
        The names of tensors of the body.
    """
    rounds, alone = sizes.pair.rounds, every == 1
    elements = {sizes.pair.elements[i].name: sizes.pair.elements[i] for i in sizes.pair.able}
    network = nx.DiGraph()
    network.add_nodes_from(("gradient", "there"))
    network.add_edges_from(("gradient", ("needed", name)) for name in elements)
    seen = set()
    waiting = [*elements.values()]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        needed, made = ("needed", tensor.name), ("made", tensor.op)
        size = sizes.bytes[tensor.name] * _PARTS
        is_state = rounds.is_state(tensor)
        if not rounds.repeats(tensor) or (alone and is_state):
            network.add_edge(needed, "there", capacity=size)
            continue
        cost: float = int(price * sizes.seconds.get(tensor.op.name, 0.0) * _PARTS)
        if cheap and tensor.op.type in kinds.EXPENSIVE:
            cost = math.inf
        network.add_edge(needed, made, capacity=size if tensor.name in elements else math.inf)
        network.add_edge(made, "there", capacity=size // every if is_state else cost)
        for before in rounds.made_from(tensor, alone):
            network.add_edge(made, ("needed", before.name), capacity=math.inf)
            waiting.append(before)
    _, (first, second) = nx.minimum_cut(network, "gradient", "there")
    return frozenset(
        name
        for name, tensor in elements.items()
        if ("needed", name) in first and ("made", tensor.op) in second
    )
