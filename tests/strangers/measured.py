"""What a step of somebody else's program takes: predicted, and measured in a process of its own.

python -m tests.strangers.measured MODULE NAME: prints what it found as JSON. The memory of the
process is that of the step alone; oneDNN and the threads are as TensorFlow has them. With a way of
`steps.WAYS` behind, that way's values are compared with plain's instead.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.measure import StepPeak
from tests.strangers.steps import compare, loss_of

#: What is asked for, in the order of the table.
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"checkpoints": "memory"},
    "0.6": {"memory_budget": 0.6},
}

#: How often each step is measured: what nothing orders takes another course in each run.
RUNS = 5


#: How far a prediction may be off, and from which peak on.
OFF, LARGE = 0.15, 20e6
#: What oneDNN's rounding makes of values at most; batch norm of random weights amplifies it.
ROUNDING = 1e-3
#: Keras and transformers have XLA compile convolutions in groups, on a CPU.
GROUPS = "XLA's convolutions in groups unroll images outside of TensorFlow's allocator"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way of running a step.

    Attributes:
        predicted: the peak that was predicted, in bytes.
        measured: the median of the peaks of some runs, in bytes.
        planned: whether something is recomputed.
        error: how far loss, gradients and state are from plain's: the norm of the difference as
            a share of the norm; 0 where every bit is the same.
        refused: the budget in bytes, where it cannot be met; the lowest is run then.
    """

    predicted: int
    measured: int
    planned: bool
    error: float
    refused: int | None


def measure(module: str, name: str) -> dict[str, Measured]:
    """Measures one program in a fresh process.

    Args:
        module: the module that has it among its STRANGERS.
        name: its name there.

    Returns:
        What came of each of ASKED.

    Raises:
        RuntimeError: the process failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TF_ENABLE_ONEDNN_OPTS"}
    # Freed blocks go back to the system at once: resident memory is memory in use.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = json.loads(_in_a_process(environment, module, name).splitlines()[-1])
    return {way: Measured(**one) for way, one in found.items()}


def compare_bits(module: str, name: str, way: str) -> None:
    """Compares a program's step with plain's in a fresh process, without oneDNN's rounding.

    Args:
        module: as in `measure`.
        name: as in `measure`.
        way: a key of `steps.WAYS`.

    Raises:
        RuntimeError: they differ; see `steps.compare`.
    """
    _in_a_process({**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}, module, name, way)


def _in_a_process(environment: dict[str, str], *arguments: str) -> str:
    """What this module prints: packages that cannot be loaded beside each other stay apart."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.strangers.measured", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr[-3000:]}")
    return done.stdout


def faults(found: dict[str, Measured]) -> list[str]:
    """What is wrong with the memory that a program's step takes, a sentence each."""
    plain = found["plain"]
    said = []
    for way, one in found.items():
        predicted, measured = f"{one.predicted / 1e6:.1f} MB", f"{one.measured / 1e6:.1f} MB"
        large = max(one.predicted, one.measured) > LARGE
        if large and abs(one.predicted - one.measured) > OFF * one.measured:
            said.append(f"{way}: predicted {predicted}, measured {measured}")
        if large and one.planned and one.measured > plain.measured:
            said.append(f"{way}: takes {measured}, plain {plain.measured / 1e6:.1f} MB")
        if one.refused and plain.measured <= one.refused:
            met = f"plain meets with {plain.measured / 1e6:.1f} MB"
            said.append(f"{way}: refused {one.refused / 1e6:.1f} MB, which {met}")
    return said


def table(rows: Sequence[tuple[str, dict[str, Measured]]]) -> list[str]:
    """A line for each program: predicted and measured MB, the share of plain, and the values."""
    lines = [f"{'model':28}" + "".join(f"{way:^34}" for way in ASKED)]
    for name, found in rows:
        cells = []
        for way, one in found.items():
            cell = f"{one.predicted / 1e6:8.1f} {one.measured / 1e6:8.1f}"
            if way != "plain":
                share = one.measured / found["plain"].measured
                cell += f" {share:5.2f} {f'{one.error:.0e}' if one.error else '='}"
            if one.refused:
                cell += f" {one.refused / 1e6:.1f} refused"
            cells.append(f"{cell:34}")
        lines.append(f"{name:28}{''.join(cells)}".rstrip())
    return lines


def _main(module: str, name: str, way: str | None = None) -> None:
    tf.config.experimental.enable_op_determinism()
    warnings.filterwarnings("ignore", "memory_saving_gradients")
    keras.utils.set_random_seed(3)
    program = importlib.import_module(module).STRANGERS[name]()
    if way:
        with pytest.MonkeyPatch.context() as monkeypatch:
            compare(*program, way, monkeypatch)
    else:
        found = _measured(*program)
        print(json.dumps({asked: dataclasses.asdict(one) for asked, one in found.items()}))


def _measured(
    forward: Callable[..., Any], inputs: Sequence[Any], variables: Sequence[tf.Variable]
) -> dict[str, Measured]:
    tensors = [tf.constant(x) for x in inputs]
    before = [v.numpy() for v in variables]
    results = {}
    for way, options in ASKED.items():
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        function, refused = _traced(forward, tensors, variables, options)
        values = [x.numpy() for x in tf.nest.flatten(function(*tensors), expand_composites=True)]
        values += [v.numpy() for v in variables]
        results[way] = function, refused, values
    # A budget's plan is there in any case, applied or not.
    baseline = msg.get_plans(results["0.6"][0].graph)[0].baseline_peak_bytes
    found = {}
    for way, (function, refused, values) in results.items():
        plans = msg.get_plans(function.graph)
        found[way] = Measured(
            predicted=plans[0].peak_bytes if plans else baseline,
            measured=_peak(functools.partial(function, *tensors)),
            planned=any(plan.recomputed for plan in plans),
            error=_distance(values, results["plain"][2]),
            refused=refused,
        )
    return found


def _traced(
    forward: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    options: dict[str, Any],
) -> tuple[Any, int | None]:
    """The step as a concrete function, and the budget in bytes if that cannot be met."""
    keras.utils.set_random_seed(7)
    tape_type = functools.partial(msg.GradientTape, **options) if options else tf.GradientTape
    trained = [v for v in variables if v.trainable]

    @tf.function
    def step(*tensors: tf.Tensor) -> Any:
        with tape_type() as tape:
            loss = loss_of(forward(*tensors))
        return loss, [grad for grad in tape.gradient(loss, trained) if grad is not None]

    try:
        return step.get_concrete_function(*tensors), None
    except msg.BudgetError as error:
        lowest = {"memory_budget": f"{error.lowest_peak_bytes}B"}
        return _traced(forward, tensors, variables, lowest)[0], error.budget_bytes


def _peak(step: Callable[[], Any]) -> int:
    peaks = []
    for _ in range(RUNS + 1):  # the first warms up
        peak = StepPeak()
        step()
        peaks.append(peak.bytes())
    return int(statistics.median(peaks[1:]))


def _distance(ours: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> float:
    pairs = [(a, b) for a, b in zip(ours, plain, strict=True) if a.dtype.kind in "fc"]
    if all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
        return 0.0
    difference = np.sqrt(
        sum(np.sum(np.abs(np.subtract(a, b, dtype=None)) ** 2.0) for a, b in pairs)
    )
    return float(difference / np.sqrt(sum(np.sum(np.abs(b) ** 2.0) for _, b in pairs)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
