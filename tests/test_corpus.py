"""The hard graphs: bit-equal gradients, less memory in a real run, nothing that runs twice."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, gradients
from tests.cases import OPTIONS, assert_same, run_session
from tests.corpus import CORPUS, LARGE

#: Every graph is tested with all of these; in the ordinary run with the first.
HOW = {
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "policy": OPTIONS["policy"],
    "budget 0.7": {"memory_budget": 0.7},
    "budget 0.4": {"memory_budget": 0.4},
}


@functools.cache
def plain_run(name):
    return run_session(*CORPUS[name], tf.gradients, measured=True)


def run_or_lowest(name, options):
    """A run within a budget, or within the lowest that the error gives: that must be met."""
    try:
        differentiate = functools.partial(gradients, **options)
        return run_session(*CORPUS[name], differentiate, measured=True)
    except BudgetError as error:
        return run_or_lowest(name, {"memory_budget": f"{error.lowest_peak_bytes}B"})


def row(name, how):
    slow = name in LARGE or how != "memory"
    return pytest.param(name, how, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:memory_saving_gradients")
@pytest.mark.parametrize(("name", "how"), [row(name, how) for name in CORPUS for how in HOW])
@pytest.mark.sweep(2)
def test_hard_graph(name, how):
    plain = plain_run(name)
    ours = run_or_lowest(name, HOW[how])
    if ours.plan and ours.plan.labels.reordered:
        pairs = (tf.nest.flatten(run.values, expand_composites=True) for run in (ours, plain))
        for a, b in zip(*pairs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    else:
        assert_same(ours.values, plain.values)
    assert_same(ours.moving, plain.moving)
    assert how != "memory" or ours.plan
    if ours.plan and ours.plan.peak_bytes < 0.8 * ours.plan.baseline_peak_bytes:
        assert ours.peak < plain.peak
    else:  # Two sessions differ, most with several losses: threads take turns.
        assert ours.peak < 1.3 * plain.peak


@pytest.mark.parametrize("name", CORPUS)
def test_every_graph_says_what_is_hard(name):
    assert "Hard:" in type(CORPUS[name][0]()).__doc__
