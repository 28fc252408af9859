"""Plans every test model at many budgets without running it, and times the planner.

On 2 cores it takes about 20 minutes.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from memory_saving_gradients.planning.articulation import sqrt_spaced
from memory_saving_gradients.planning.bounds import lower_bound
from memory_saving_gradients.planning.problem import Op, Problem, Schedule, Tensor, baseline
from memory_saving_gradients.planning.search import within
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from memory_saving_gradients.planning.strategies import STRATEGIES
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import read
from memory_saving_gradients.rewriting.running_sums import taken_apart
from scripts.benchmarks.common import Section
from scripts.benchmarks.models import MODELS
from test_models import Model, ResNet50, UNet, build_v1

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.175, 0.15, 0.125, 0.1)
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


#: What others report of the same architecture: (source, builder, batch, peak as a share of theirs
#: without recomputation, their overhead or None).
PUBLISHED: dict[str, tuple[str, Callable[[], Model], int, float, float | None]] = {
    "ResNet-50, batch 184": ("MONeT", functools.partial(ResNet50, 224), 184, 4.99 / 15.06, 0.12),
    "ResNet-50, batch 96": ("Kusumoto et al.", functools.partial(ResNet50, 224), 96, 0.38, None),
    "U-Net, batch 8": ("Kusumoto et al.", functools.partial(UNet, 512, 64), 8, 0.52, None),
}


def read_model(make: Callable[[], Model], batch: int, device: str = "cpu") -> Problem:
    """The step of a model; nothing runs."""
    with tf.Graph().as_default() as graph:
        step = build_v1(make(), batch)
        first_new = len(graph.get_operations())
        grads = tf.gradients(step.loss, step.variables)
        backward = BackwardPass.since(first_new, step.loss, tf.nest.flatten(grads, True), device)
        return read(taken_apart(backward)).problem


def frontier(label: str) -> dict:
    """Peaks in bytes and overheads of every method, and the lower bound at those budgets."""
    problem = read_model(*MODELS[label])
    plain, cost = plain_peak(problem), problem.costs.sum()

    def point(schedule: Schedule) -> list[float]:
        found = simulate(problem, schedule)
        return [found.peak, found.cost / cost - 1.0]

    planned, bound = [], []
    for share in SHARES:
        budget = int(share * plain)
        schedule = within(problem, budget)
        found = point(schedule)
        if found[0] > budget:
            break
        planned.append(found)
        ordered, _, _ = problem.in_order_of(schedule)
        bound.append([budget, lower_bound(ordered, budget)])
    return {
        "tf.gradients": [plain, 0.0],
        "√n": point(sqrt_spaced(problem)),
        **{name: point(strategy(problem)) for name, strategy in STRATEGIES.items()},
        "budgets": planned,
        "bound": bound,
    }


def beside_published(label: str) -> dict:
    """Our plan at the share of memory that others report, and the lowest peak that we reach.

    Costs are estimated for a V100. Parameters and their gradients count in the published figures;
    here the gradients do, and the parameters, which no plan changes, do not.
    """
    source, make, batch, share, overhead = PUBLISHED[label]
    problem = read_model(make, batch, "v100")
    plain, cost = plain_peak(problem), problem.costs.sum()
    found = simulate(problem, within(problem, int(share * plain)))
    lowest = simulate(problem, STRATEGIES["memory"](problem))
    return {
        "source": source,
        "share": share,
        "published_overhead": overhead,
        "reached": found.peak / plain,
        "overhead": found.cost / cost - 1.0,
        "lowest": lowest.peak / plain,
        "lowest_overhead": lowest.cost / cost - 1.0,
    }


def residual_step(count: int) -> Problem:
    """A step of `count` ops: a chain whose every third op also reads the one three before it."""
    rng = np.random.default_rng(0)
    forward = count // 2
    sizes = rng.choice([1, 2, 4], forward) * 1000
    tensors = [Tensor(f"f{i}:0", int(size)) for i, size in enumerate(sizes)]
    ops = []
    for i in range(forward):
        inputs = tuple(t for t in ((i - 1, i - 3) if i % 3 == 0 else (i - 1,)) if t >= 0)
        ops.append(Op(f"f{i}", inputs, (i,), cost=float(sizes[i])))
    for i in reversed(range(forward)):
        before = (len(tensors) - 1,) if i < forward - 1 else ()
        inputs = (i, *((i - 1,) if i else ()), *before)
        ops.append(Op(f"b{i}", inputs, (len(tensors),), cost=float(sizes[i]), backward=True))
        tensors.append(Tensor(f"b{i}:0", int(sizes[i])))
    return Problem(tuple(ops), tuple(tensors), frozenset({len(tensors) - 1}))


def time_planner(count: str) -> dict[str, float]:
    """What planning a step of so many ops for a fifth of its memory takes."""
    problem = residual_step(int(count))
    plain = simulate(problem, baseline(problem))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    found = simulate(problem, within(problem, plain.peak // 5))
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "peak_rss_bytes": after,
        "added_rss_bytes": after - before,
        "share": found.peak / plain.peak,
        "overhead": found.cost / plain.cost - 1.0,
    }


SECTIONS = {
    "models": Section(MODELS, frontier),
    "published": Section(PUBLISHED, beside_published),
    # On one core, so that the time can be told.
    "scaling": Section([str(size) for size in SIZES], time_planner, {"OMP_NUM_THREADS": "1"}),
}
