"""What was decided for a graph, to be shown, saved and applied again."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from memory_saving_gradients.console.progress_bar import bar
from memory_saving_gradients.planning.bounds import certified
from memory_saving_gradients.planning.labels import Labels
from memory_saving_gradients.planning.plan_data import LoopPlan, PlanData
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import plain_peak, simulate
from memory_saving_gradients.report import export, page, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plan(PlanData):
    """A schedule for a step, and what it takes.

    Attributes:
        strategy: what made it: "memory", "speed", "auto", "articulation", "collection", "list",
            "policy", or "budget" or "overhead" where that alone decided.
        budget_bytes: the budget that it was made for, in bytes; None if there was none.
        baseline_peak_bytes: predicted peak of the step without recomputation, in bytes.
        peak_bytes: predicted peak of this plan, in bytes.
        overhead: predicted extra cost, as a fraction of the cost of the plain step.
        checkpoints: names of the forward tensors that are kept for the backward pass.
        given: those of them that the user gave.
        recomputed: names of the ops that run a second time.
        seconds: time taken to read the graph, plan, and rewrite it.
        problem: the step as data.
        schedule: the order of running, as indices into `problem.ops`.
        batch_size: the size that was planned for, where the graph leaves the first dimension of its
            inputs unknown; None where it knows all.
        batch_assumed: whether nobody said that size.
        growth: the bytes that each tensor, and then the scratch space of each op, gains with every
            example of the batch; empty where `batch_size` is None.
        measured_peak_bytes: the peak of a real run, in bytes, where `verify=True` or a budget asked
            for one: what TensorFlow's allocator was asked for.
        process_peak_bytes: what the process grew by in such a run, in bytes, where that is another
            figure by more than a tenth; the larger one is held against a budget.
        compiled_peak_bytes: what XLA allocates for the step beside its arguments and results, in
            bytes, by its compiler's own report; None where that was not asked.
        compiled_for: what it was compiled for: "h100", say, or "this machine".
        baseline_one_thread_bytes: predicted peak of the step without recomputation in a session of
            one inter-op thread, in bytes, where the graph does not tell its session; else None.
        labels: what the user calls the ops and tensors of the problem.
        certified_overhead: what `certify` proved: no plan for the budget has a lower overhead.
        loops: the loops of the step, and in what segments their gradients run them again.
    """

    def certify(self, seconds: float = 60.0) -> Plan:
        """The same plan with a tighter `lower_bound`, by an integer program of several moments.

        Args:
            seconds: the time that the solver may take. Where that is not enough for the optimum,
                what is proven by then counts.

        Returns:
            A plan that differs in `certified_overhead`, and so in `lower_bound` and `gap`.

        Raises:
            ValueError: `seconds` is not positive.

        The program is that of Checkmate (Jain et al., MLSys 2020) at some of its stages; HiGHS
        solves it.
        """
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds!r}")
        with bar(f"certifying, for up to {seconds:.0f} s", 1):
            overhead = certified(self.problem, self.allowed_bytes, seconds).overhead
        return dataclasses.replace(self, certified_overhead=max(overhead, self.certified_overhead))

    def at(self, batch_size: int) -> Plan:
        """The same plan for batches of another size, with the peaks that it has there.

        Args:
            batch_size: how many examples.

        Returns:
            A plan that differs in sizes of tensors and in predicted peaks, both in bytes.

        Raises:
            ValueError: the graph knows the sizes of all inputs, so that there is no other size.

        Example:
            >>> import tensorflow as tf
            >>> from memory_saving_gradients import get_plans, gradients_memory
            >>> with tf.Graph().as_default() as graph:
            ...     x = tf.compat.v1.placeholder(tf.float32, (None, 1000))
            ...     y = x
            ...     for _ in range(16):
            ...         y = tf.tanh(y)
            ...     grads = gradients_memory(y, x, batch_size=64)
            >>> plan = get_plans(graph)[-1]
            >>> plan.at(128).peak_bytes == 2 * plan.peak_bytes
            True
        """
        if self.batch_size is None:
            raise ValueError("this plan has one size: the graph knows the shapes of all inputs")
        problem = self.problem.grown(self.growth, batch_size - self.batch_size)
        return dataclasses.replace(
            self,
            problem=problem,
            baseline_peak_bytes=plain_peak(problem),
            peak_bytes=simulate(problem, self.schedule).peak,
            batch_size=batch_size,
            batch_assumed=False,
            baseline_one_thread_bytes=None,
            measured_peak_bytes=None,
            process_peak_bytes=None,
            compiled_peak_bytes=None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file, whole or not at all.

        Args:
            path: the file; one that is there is replaced.

        `gradients(..., plan=path)` applies it to the same graph again, without planning.
        """
        content = dataclasses.asdict(self)
        content["problem"]["results"] = sorted(self.problem.results)
        for name in _SETS:
            content["labels"][name] = sorted(content["labels"][name])
        target = Path(path)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_text(json.dumps({"format": _FORMAT, "plan": content}))
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote.

        Args:
            path: the file.

        Raises:
            ValueError: the file holds no plan of this version.
        """
        try:
            saved = json.loads(Path(path).read_text())
            if saved["format"] != _FORMAT:
                raise ValueError(f"its format is {saved['format']}, not {_FORMAT}")
            content = saved["plan"]
            problem, labels = content["problem"], _tuples(content["labels"])
            content["problem"] = Problem(
                ops=tuple(Op(**op) for op in map(_tuples, problem["ops"])),
                tensors=tuple(Tensor(**tensor) for tensor in problem["tensors"]),
                results=frozenset(problem["results"]),
                as_executed=tuple(problem["as_executed"]),
                waits=_tuples(problem["waits"]),
            )
            content["labels"] = Labels(**labels | {n: frozenset(labels[n]) for n in _SETS})
            content["loops"] = [LoopPlan(**loop) for loop in content["loops"]]
            return cls(**{name: _tuples(value) for name, value in content.items()})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{os.fspath(path)} holds no plan that can be used: {error}"
            ) from error

    def summary(self, short: bool = False, print_fn: Callable[[str], object] | None = None) -> None:
        """Prints what is kept, what runs again, and what holds the peak.

        A table names for every checkpoint the layer (or line of code) that made it, its shape,
        dtype and bytes, and why it is kept; another the segments that run again, with the bytes
        that are free meanwhile and what they cost; a third what is alive at the peak. A plan that
        is the last value of a notebook's cell shows the same.

        Args:
            short: two lines instead, for logs.
            print_fn: what to call with the text instead of `print`.

        Example:
            >>> import tensorflow as tf
            >>> from memory_saving_gradients import get_plans, gradients_memory
            >>> with tf.Graph().as_default() as graph:
            ...     x = y = tf.compat.v1.placeholder(tf.float32, (1000, 1000))
            ...     for _ in range(8):
            ...         y = tf.tanh(y)
            ...     grads = gradients_memory(y, x)
            >>> get_plans(graph)[-1].summary(short=True)  # doctest: +ELLIPSIS
            memory: predicted peak 36.0 MB -> 16.0 MB (2.25x), overhead ...
            keeps ... tensors, runs ... segments again; the peak is at ...
        """
        text = (
            summary.short(self) if short else summary.text(self, None if print_fn else sys.stdout)
        )
        (print_fn or print)(text)

    def _repr_html_(self) -> str:
        return summary.html(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws the memory alive over the step, plain and by this plan.

        The time is TensorFlow's estimate, so a plan ends as far to the right of the plain step as
        it costs more. Where ops run again is marked below; a budget is a dashed line.

        Args:
            path: a file to write, `.png` or `.svg`; it has no background of its own and can be read
                on white and on black.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from memory_saving_gradients.report import figures

        return figures.timeline(self, path)

    def plot_frontier(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws what other budgets would cost: extra cost against peak, this plan marked.

        The step is planned for some ten budgets for it, with a progress bar: that takes about ten
        times as long as one plan.

        Args:
            path: a file to write, as in `plot`.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from memory_saving_gradients.report import figures

        return figures.frontier(self, path)

    def plot_graph(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws the network: a row for each layer (or for a few), from the input down to the loss.

        Bars say how much of what a row makes is kept, runs again, or is not wanted again; shades
        part the segments; arcs are tensors that skip rows.

        Args:
            path: a file to write, as in `plot`.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from memory_saving_gradients.report import figures

        return figures.network(self, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the predicted step as a trace that https://ui.perfetto.dev and Chrome can show.

        Args:
            path: the file, JSON: each run of an op with its estimated time, and the bytes alive,
                for this plan and for the plain step.
        """
        Path(path).write_text(json.dumps(export.as_trace(self)))

    def save_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes a page that shows the memory over the step, for a browser.

        Under the pointer it names what runs at that time, by this plan and in the plain step: the
        op, its layer, the bytes it makes, whether it runs again, and which layers hold the memory.
        The wheel zooms.

        Args:
            path: the file, HTML; it holds all that it needs and fetches nothing.
        """
        Path(path).write_text(page.timeline(self), encoding="utf-8")

    def to_json(self) -> str:
        """The report as JSON: what `summary` says, and the bytes alive at every run.

        Sizes are in bytes, times in seconds, overheads are fractions of the plain step's cost. It
        cannot be applied to a graph: `save` writes what can.
        """
        return json.dumps(export.as_data(self))

    def to_networkx(self) -> nx.DiGraph:
        """The step as a graph of ops.

        Returns:
            A node for each op by name, with `type`, `origin`, `backward`, `seconds`, `bytes`
            (that it makes), `runs`, and `kept`; an edge for each tensor that an op reads, with
            `tensor` and `bytes`.
        """
        return export.as_graph(self)


# The version of the file format.
_FORMAT = 5

# The labels that are sets.
_SETS = ("of_weights", "sums", "updates")


def _tuples(value: Any) -> Any:
    """What JSON made a list is a tuple again, at any depth."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
