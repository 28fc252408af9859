"""The ways to run a loop: what its rounds keep is the best there is."""

import dataclasses
import itertools

import pytest
import tensorflow as tf

from memory_saving_gradients.graph import kinds
from memory_saving_gradients.graph.loops import gradients_of_loops, pair_of
from memory_saving_gradients.graph.shapes import Shapes
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.loop_sizes import sizes_of
from memory_saving_gradients.reading.loop_ways import frontier, kept_at
from memory_saving_gradients.reading.read import read
from tests.loops import FORMS, sequence, weight

PRICES = [0.0, 1e6, 1e7, 1e8, 1e9, 1e12]


def sizes_of_form(name):
    """The loop of a form, in a graph that is returned as well, as it must stay alive."""
    with tf.Graph().as_default() as graph:
        x, w = tf.tile(sequence(), [1, 64, 1]), tf.convert_to_tensor(weight())
        loss = tf.reduce_sum(FORMS[name](x, w))
        first_new = len(graph.get_operations())
        reading = read(BackwardPass.since(first_new, loss, tf.gradients(loss, [w])))
        ((backward, forward),) = gradients_of_loops(reading.operations).items()
        shapes = Shapes([*reading.step.needed], reading.sizes)
        return sizes_of(pair_of(forward, backward), reading, shapes), graph


def value(sizes, way, price):
    """The bytes that a round holds, and the seconds of what is recomputed, at a price."""
    held = way.kept | {t.name for t in way.start.once}
    one_round = dataclasses.replace(sizes, rounds=1, call_seconds=0.0)
    bytes_held = sum(sizes.bytes[name] for name in held) + sizes.states(way)
    return bytes_held + price * one_round.more_seconds(way)


@pytest.mark.parametrize("name", ["while_loop", "lstm", "scan", "custom_gradient"])
def test_what_a_round_keeps_is_the_best_of_all_subsets(name):
    sizes, _graph = sizes_of_form(name)
    names = [sizes.pair.elements[i].name for i in sizes.pair.able]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(min(len(names), 6) + 1)
    )
    ways = [sizes.pair.way(1, kept) for kept in subsets]
    for price in PRICES:
        found = sizes.pair.way(1, kept_at(price, sizes, every=1, cheap=False))
        least = min(value(sizes, way, price) for way in ways)
        assert value(sizes, found, price) <= least * (1 + 1e-9)


@pytest.mark.parametrize("name", ["while_loop", "lstm", "long_sum"])
@pytest.mark.parametrize("cheap", [False, True])
@pytest.mark.parametrize("times", [1, 1000])
def test_ways_hold_fewer_and_fewer_bytes_for_more_and_more_seconds(name, cheap, times):
    sizes, _graph = sizes_of_form(name)
    lists = {number: times * size for number, size in sizes.list_bytes.items()}
    sizes = dataclasses.replace(sizes, rounds=times * sizes.rounds, list_bytes=lists)
    found = frontier({sizes.pair: sizes}, cheap, deep=True)
    plain, *ways = (each.get(sizes.pair) for each in found)
    assert plain is None
    assert ways
    assert (ways[-1].within > 0) == (times > 1)
    assert cheap or any(way.every > 1 and not way.within for way in ways)
    held = [sizes.plain, *(sizes.held(way) + sizes.working(way) for way in ways)]
    assert held == sorted(held, reverse=True)
    seconds = [sizes.more_seconds(way) for way in ways]
    assert seconds == sorted(seconds)


def test_segments_of_an_unknown_number_of_rounds_run_again_as_a_whole():
    sizes, _graph = sizes_of_form("lstm")
    unknown = dataclasses.replace(sizes, counted=False)
    ways = frontier({sizes.pair: unknown}, deep=True)[1:]
    assert ways
    assert not any(found[sizes.pair].within for found in ways)


def test_cheap_ways_recompute_no_product():
    sizes, _graph = sizes_of_form("lstm")
    only_products = dataclasses.replace(
        sizes,
        call_seconds=0.0,
        seconds={
            op.name: 1.0 for op in sizes.pair.body.get_operations() if op.type in kinds.EXPENSIVE
        },
    )
    for cheap in (False, True):
        lean = frontier({sizes.pair: sizes}, cheap)[-1][sizes.pair]
        assert (only_products.more_seconds(lean) == 0) == cheap
