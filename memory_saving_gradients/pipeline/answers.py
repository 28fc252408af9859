"""A cache of schedules, so that equal problems are planned once.

Replicas of a model, a graph that is traced again and, with a folder, other processes reuse the
schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from pathlib import Path

import numpy as np

from memory_saving_gradients import planning
from memory_saving_gradients.console.progress_bar import say
from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.planning import anneal
from memory_saving_gradients.planning.problem import Problem, Schedule
from memory_saving_gradients.planning.search import affordable, pinning, within
from memory_saving_gradients.planning.strategies import STRATEGIES, keep_given, without_expensive

# The most schedules that are remembered; each takes a few bytes per run.
_REMEMBERED = 64


@dataclasses.dataclass(frozen=True)
class Question:
    """The key of a schedule; equal for two problems that differ only in names."""

    structure: str
    strategy: str
    kept: frozenset[int] | None
    budget: int | None
    max_overhead: float | None
    most_runs: int


_answers: dict[Question, np.ndarray] = {}


def forget() -> None:
    """Clears the cache of this process."""
    _answers.clear()


def answer(question: Question, problem: Problem, folder: Path | None = None) -> Schedule:
    """The schedule for a problem, planned if it is in neither the cache nor the folder."""
    file = None if folder is None else _file(folder, question)
    stored = _read(file) if file else None
    schedule = _answers.get(question, stored)
    if schedule is None:
        schedule = np.asarray(_planned(question, problem), dtype=np.int32)
    if file and stored is None:
        _write(file, schedule)
    _answers[question] = schedule
    while len(_answers) > _REMEMBERED:
        _answers.pop(next(iter(_answers)), None)
    return schedule.tolist()


def _planned(question: Question, problem: Problem) -> Schedule:
    kept = question.kept
    bounded = question.budget is not None or question.max_overhead is not None
    if kept is not None and not bounded:
        return keep_given(problem, set(kept))
    _say_if_compiling()
    if bounded:
        allowed = (
            without_expensive(problem)
            if question.strategy == "speed"
            else pinning(problem, set(kept or ()))
        )
        if question.budget is not None:
            return within(allowed, question.budget, question.most_runs)
        return affordable(allowed, question.max_overhead or 0.0, question.most_runs)
    return STRATEGIES[question.strategy](problem, question.most_runs)


@functools.cache
def _say_if_compiling() -> None:
    """Says, once per process, that the planner has to be compiled, which takes a while."""
    if not anneal.is_stored():
        warn(
            "memory_saving_gradients: the planner is compiled in every process, which takes about "
            "10 seconds, as neither its own folder nor the user's cache is writable: set "
            "NUMBA_CACHE_DIR to a writable folder."
        )
    elif not anneal.is_compiled():
        say(
            "memory_saving_gradients: compiling the planner, once on this machine: about 10 seconds"
        )


def _file(folder: Path, question: Question) -> Path:
    """The file of the schedule, for this version of the planner."""
    facts = dataclasses.replace(question, kept=None), sorted(question.kept or ())
    name = hashlib.sha256(repr((facts, question.kept is None, _planner())).encode())
    return folder / f"{name.hexdigest()[:40]}.npy"


@functools.cache
def _planner() -> str:
    """A hash of the planner's source, so that each version has its own cache."""
    files = sorted(Path(planning.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(file: Path) -> np.ndarray | None:
    """The schedule in a file; None if there is none, or an incomplete one."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(file, allow_pickle=False)
    return None


def _write(file: Path, schedule: np.ndarray) -> None:
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as opened:
            np.save(opened, schedule)
        os.replace(unfinished, file)
    except OSError as error:
        warn(f"memory_saving_gradients: the plan was not stored in plan_cache: {error}")
