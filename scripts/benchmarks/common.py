"""What benchmarks share: the rows of a file, and how ways to train a model are measured."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from memory_saving_gradients import BudgetError, Plan, get_plans, measure
from scripts.benchmarks.fresh import ROOT
from test_models import Model, build_v1

#: How often each step is timed.
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows of a file of results.

    Attributes:
        labels: the rows' names.
        measure: called with a label in a fresh process (see `fresh`); returns the row.
        environment: variables of that process.
    """

    labels: Iterable[str]
    measure: Callable[[str], Any]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that was built in one way.

    Attributes:
        run: one step.
        peak_bytes: its measured peak.
        plan: what was planned, if anything.
    """

    run: Callable[[], Any]
    peak_bytes: int
    plan: Plan | None = None


def in_session(
    make: Callable[[], Model],
    batch: int,
    differentiate: Callable[..., list],
    threads: int | None = None,
    runs: int = 1,
) -> Step:
    """A model's step in a session.

    Args:
        make: builds the model.
        batch: its batch.
        differentiate: `tf.gradients`, or what stands in its place.
        threads: inter-op threads; as `tf.config` says if None.
        runs: how often the peak is measured; the highest counts.
    """
    v1, model = tf.compat.v1, make()
    with tf.Graph().as_default() as graph:
        step = build_v1(model, batch)
        grads = differentiate(step.loss, step.variables)
        fetches = [g for g in tf.nest.flatten(grads, expand_composites=True) if g is not None]
        config = v1.ConfigProto(inter_op_parallelism_threads=threads) if threads else None
        session = v1.Session(config=config)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
    feed = step.feed(model.example(batch))

    def run() -> list:
        return session.run(fetches, feed)

    run()
    peak = max(measure.session_peak(session, fetches, feed) for _ in range(runs))
    return Step(run, peak, next(reversed(get_plans(graph)), None))


def measure_ways(ways: Mapping[str, Callable[[], Step]]) -> dict[str, dict]:
    """Peak, prediction and time of each way; the first is plain."""
    found: dict[str, dict] = {}
    steps: dict[str, Callable[[], Any]] = {}
    plain = next(iter(ways))
    for way, build in ways.items():
        try:
            step = build()
        except (BudgetError, RuntimeError) as error:
            found[way] = {"error": one_line(error)}
            continue
        steps[way] = step.run
        found[way] = {"peak_bytes": step.peak_bytes}
        if step.plan is not None:
            found[way] |= planned(step.plan)
            found[plain].setdefault("predicted_bytes", step.plan.baseline_peak_bytes)
    for way, time in timed(steps, plain).items():
        found[way] |= time
    return found


def planned(plan: Plan) -> dict[str, Any]:
    """What a plan says."""
    return {
        "predicted_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "planning_seconds": plan.seconds,
    }


def timed(steps: dict[str, Callable[[], Any]], plain: str) -> dict[str, dict]:
    """The steps' times and their ratios to the plain one; they run in turns."""
    times = measure.step_times(steps, ROUNDS)
    found = {}
    for way, seconds in times.items():
        ratios = [ours / theirs for ours, theirs in zip(seconds, times[plain], strict=True)]
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if ROUNDS > 1 else 3 * ratios
        )
        found[way] = {
            "seconds": statistics.median(seconds),
            "time_ratio": middle,
            "quartiles": [low, high],
        }
    return found


def run_in_jax(network: str) -> dict[str, dict]:
    """Peak and time of each way of `jax.checkpoint` on a network of `peers_jax`, where JAX is."""
    command = [sys.executable, "-m", "scripts.benchmarks.peers_jax", network]
    settings = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    settings.pop("XLA_FLAGS", None)  # TensorFlow's
    ran = subprocess.run(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    for row in found.values():
        row["time_ratio"] = row["seconds"] / found["JAX"]["seconds"]
    return found


def one_line(error: Exception) -> str:
    """An error's message, without colours."""
    return re.sub(r"\x1b\[\d+m|\s+", " ", str(error)).strip()
