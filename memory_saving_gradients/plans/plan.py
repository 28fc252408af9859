"""The plan for a graph, which can be shown, saved and applied again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from memory_saving_gradients.planning.packing import allocated
from memory_saving_gradients.planning.plan_data import LoopPlan, PiecesPlan, PlanData
from memory_saving_gradients.planning.problem import Op, Problem, Tensor
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.report import export, page, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Plan(PlanData):
    """A schedule for a step, with its predicted and measured memory and cost.

    Attributes:
        strategy: what chose it: "memory", "speed", "auto", "articulation", "collection", "list",
            "policy", or "budget" or "overhead" if only that was given.
        budget_bytes: the budget that it was made for, in bytes; None if there was none.
        baseline_peak_bytes: predicted peak of the step without recomputation, in bytes.
        peak_bytes: predicted peak of this plan, in bytes.
        overhead: predicted extra cost, as a fraction of the cost of the plain step.
        checkpoints: names of the forward tensors that are kept for the backward pass.
        given: those of them that the user gave.
        recomputed: names of the ops that run a second time.
        seconds: the time for reading the graph, planning, and rewriting it.
        problem: the step as data.
        schedule: the execution order, as indices into `problem.ops`.
        batch_size: the batch size that was planned for, if the graph leaves the first dimension of
            its inputs unknown; else None.
        batch_assumed: whether that size was assumed, not given.
        growing: returns the bytes per example of each tensor, and of each op's scratch space, by
            name; nothing if `batch_size` is None.
        measured_peak_bytes: the peak of a real run, in bytes, if `verify=True` or a budget required
            one: the memory requested from TensorFlow's allocator.
        process_peak_bytes: the growth of the process in such a run, in bytes, if the two differ by
            more than a tenth; the larger one counts against a budget.
        compiled_peak_bytes: what XLA allocates for the step besides its arguments and results, in
            bytes, by its compiler's own report; None if it was not compiled.
        baseline_compiled_bytes: the same for the step without recomputation, compiled if
            `verify=True` or if the budget is a share of it; else None.
        compiled_for: what it was compiled for, such as "h100" or "this machine".
        baseline_one_thread_bytes: predicted peak of the step without recomputation in a session of
            one inter-op thread, in bytes, if the threads of the session are unknown; else None.
        labels: names and shapes of the ops and tensors of the problem.
        certified_overhead: the bound proved by `certify`: no plan for the budget has a lower
            overhead.
        loops: the loops of the step, and the segments in which their gradients recompute them.
        pieces: the largest tensors of the step, and in how many pieces they are computed, if
            `pieces` allows it.
    """

    def certify(self, seconds: float = 60.0) -> Plan:
        """The same plan with a tighter `lower_bound`, by an integer program of several moments.

        Args:
            seconds: the time that the solver may take. If that is not enough for the optimum, the
                bound is what is proven by then.

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
        """The same plan for another batch size, with its peaks there.

        Args:
            batch_size: how many examples.

        Returns:
            A plan that differs in the sizes of tensors and in predicted peaks, both in bytes.

        Raises:
            ValueError: the graph fixes the sizes of all inputs, or it does not exist any more.

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
            raise ValueError("this plan has one size: the graph fixes the shapes of all inputs")
        problem = self.problem.grown(self.growing(), batch_size - self.batch_size)
        return dataclasses.replace(
            self,
            problem=problem,
            baseline_peak_bytes=plain_peak(problem),
            peak_bytes=allocated(problem, self.schedule),
            batch_size=batch_size,
            batch_assumed=False,
            baseline_one_thread_bytes=None,
            measured_peak_bytes=None,
            process_peak_bytes=None,
            compiled_peak_bytes=None,
            baseline_compiled_bytes=None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file, atomically.

        Args:
            path: the file; an existing one is replaced.

        `gradients(..., plan=path)` applies it to the same graph again, without planning.
        """
        content = dataclasses.asdict(self) | {"growing": {}}
        with contextlib.suppress(ValueError):  # its graph is gone
            content["growing"] = self.growing()
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
                barriers=problem["barriers"],
            )
            content["labels"] = Labels(**labels | {n: frozenset(labels[n]) for n in _SETS})
            content["growing"] = functools.partial(_saved, content["growing"])
            content["loops"] = [LoopPlan(**_tuples(loop)) for loop in content["loops"]]
            content["pieces"] = [PiecesPlan(**one) for one in content["pieces"]]
            return cls(**{name: _tuples(value) for name, value in content.items()})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{os.fspath(path)} holds no plan that can be used: {error}"
            ) from error

    def summary(self, short: bool = False, print_fn: Callable[[str], object] | None = None) -> None:
        """Prints what is kept, what is recomputed, and what is alive at the peak.

        One table lists every checkpoint with the layer (or line of code) that made it, its shape,
        dtype and bytes, and why it is kept. Another lists the segments that run again, with the
        bytes that are free meanwhile and what they cost. A third shows what is alive at the peak. A
        notebook shows the same for a plan that is the last value of a cell.

        Args:
            short: whether to print two lines instead, for logs.
            print_fn: a function to call with the text instead of `print`.

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

        The time axis is TensorFlow's estimate, so a plan ends to the right of the plain step by its
        extra cost. A band below marks where ops run again; a dashed line is the budget.

        Args:
            path: a file to write, `.png` or `.svg`; its background is transparent, and it is
                readable on white and on black.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from memory_saving_gradients.report import figures

        return figures.timeline(self, path)

    def plot_frontier(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws what other budgets would cost: extra cost against peak, with this plan marked.

        This plans the step for about ten budgets, with a progress bar, and so takes about ten times
        as long as one plan.

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

        Bars show how many bytes of a row's outputs are kept, are recomputed, or are not needed
        again; shading separates the segments; arcs are tensors that skip rows.

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
        """Writes a web page that shows the memory over the step.

        At the pointer it shows what runs at that time, by this plan and in the plain step: the op,
        its layer, the bytes of its outputs, whether it is recomputed, and which layers hold the
        memory. The mouse wheel zooms.

        Args:
            path: the file, HTML; it is self-contained.
        """
        Path(path).write_text(page.timeline(self), encoding="utf-8")

    def to_json(self) -> str:
        """The report as JSON: the data of `summary`, and the bytes alive at every run.

        Sizes are in bytes, times in seconds, overheads are fractions of the plain step's cost. For
        a plan that can be applied again, use `save`.
        """
        return json.dumps(export.as_data(self))

    def to_networkx(self) -> nx.DiGraph:
        """The step as a graph of ops.

        Returns:
            A node for each op by name, with `type`, `origin`, `backward`, `seconds`, `bytes` (of
            its outputs), `runs`, and `kept`; an edge for each tensor that an op reads, with
            `tensor` and `bytes`.
        """
        return export.as_graph(self)


# The version of the file format.
_FORMAT = 8

# The labels that are sets.
_SETS = ("of_weights", "sums", "updates")


def _saved(growing: dict[str, float]) -> dict[str, float]:
    if not growing:
        raise ValueError("this plan was saved when its graph was gone, so it has one size")
    return growing


def _tuples(value: Any) -> Any:
    """Turns the lists of JSON back into tuples, at any depth."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
