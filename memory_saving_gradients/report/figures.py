"""A plan as pictures: memory over the step, the frontier of plans, the network."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memory_saving_gradients.console.progress_bar import bar
from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.planning.problem import baseline, copied
from memory_saving_gradients.planning.search import within
from memory_saving_gradients.planning.simulate import plain_timeline, simulate
from memory_saving_gradients.planning.strategies import STRATEGIES
from memory_saving_gradients.report import facts
from memory_saving_gradients.report.layers import Row, coarse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Readable on white paper and on a dark page: figures have no background of their own.
COLOURS = {
    "text": "#6e7781",
    "plain": "#828b95",
    "plan": "#1a8f5f",
    "again": "#d0690a",
    "budget": "#3b7fe0",
    "kept": "#8957e5",
}

#: The width of a figure in inches, and the size of its text in points: on a phone, 390 pixels wide,
#: letters are 9 pixels high.
WIDTH, TEXT = 5.0, 9

# Pixels per inch.
_DPI = 144
# The number of budgets on the frontier, between the plain peak and the lowest feasible one.
_BUDGETS = 8
# The most points at which a step is drawn; each shows the highest moment up to the next.
_POINTS = 2_000
# The most characters of a label.
_LABEL = 26


def timeline(plan: PlanData, path: str | os.PathLike[str] | None = None) -> Figure:
    """Memory over the step, plain and planned; see `Plan.plot`."""
    problem = plan.problem
    figure = _figure(3.8)
    axes = figure.add_subplot()
    plain = baseline(problem)
    total = float(problem.costs.sum()) or 1.0
    first, copies = copied(problem, plan.schedule)
    course = simulate(problem, plan.schedule).timeline
    drawn = {
        "plain": (_percent(problem.seconds_of(plain), total), plain_timeline(problem)),
        "plan": (_percent(problem.seconds_of(plan.schedule), total), course),
    }
    peaks = {"plain": facts.at_plain_peak(plan).origin, "plan": facts.at_peak(plan).origin}
    for name, label in (("plain", "plain"), ("plan", plan.strategy)):
        times, held = _thinned(*drawn[name])
        place, origin = int(held.argmax()), facts.shortened(peaks[name], _LABEL)
        label = f"{label}: peak {held.max() / 1e6:,.0f} MB, at {origin}"
        axes.fill_between(times, held / 1e6, step="post", color=COLOURS[name], alpha=0.12, lw=0)
        axes.step(times, held / 1e6, where="post", color=COLOURS[name], lw=1.2, label=label)
        axes.plot(times[place : place + 2].mean(), held[place] / 1e6, "o", color=COLOURS[name])
    times = drawn["plan"][0]
    top = max(plan.baseline_peak_bytes, plan.peak_bytes, plan.budget_bytes or 0) / 1e6
    _mark_copies(axes, times, np.array(copies), top)
    if plan.budget_bytes is not None:
        label = f"budget: {plan.budget_bytes / 1e6:,.0f} MB"
        axes.axhline(plan.budget_bytes / 1e6, color=COLOURS["budget"], ls="--", lw=1, label=label)
    begins = times[first] if first < len(times) else times[-1]
    axes.axvline(begins, color=COLOURS["text"], lw=0.8, ls=":")
    for where, x, side in (("forward", begins, "right"), ("backward", begins, "left")):
        style: dict[str, Any] = {"color": COLOURS["text"], "fontsize": TEXT}
        axes.text(x, 1.16 * top, f" {where} ", ha=side, va="top", **style)
    axes.set_xlim(0, times[-1])
    axes.set_ylim(-0.06 * top, 1.18 * top)
    axes.set_xlabel("estimated time, % of the plain step")
    axes.set_ylabel("MB alive")
    _legend_below(figure, 1)
    return _done(figure, axes, _title(plan), path)


def frontier(plan: PlanData, path: str | os.PathLike[str] | None = None) -> Figure:
    """Peak against overhead, with the chosen plan; see `Plan.plot_frontier`."""
    problem = plan.problem
    cost = float(problem.costs.sum()) or 1.0

    def point(schedule: Any) -> tuple[float, float]:
        simulation = simulate(problem, schedule)
        return simulation.peak / 1e6, 100 * (simulation.cost / cost - 1)

    with bar("planning for the frontier", 1 + len(STRATEGIES) + _BUDGETS) as tick:
        named = {}
        for name, strategy in STRATEGIES.items():
            # Run again on the plan's own order of ops, its strategy may find another schedule.
            named[name] = point(plan.schedule if name == plan.strategy else strategy(problem))
            tick()
        lowest = within(problem, 0)
        tick()
        curve = [point(lowest)]
        for share in np.linspace(0, 1, _BUDGETS + 1)[1:] ** 2:  # closer where it is steep
            low, high = curve[0][0] * 1e6, plan.baseline_peak_bytes
            curve.append(point(within(problem, int(low + share * (high - low)))))
            tick()
    figure = _figure(3.8)
    axes = figure.add_subplot()
    curve = _undominated([*curve, (plan.baseline_peak_bytes / 1e6, 0.0)])
    axes.plot(*zip(*curve, strict=True), color=COLOURS["budget"], marker=".", label="budgets")
    for (name, where), marker in zip(named.items(), "o^sd", strict=True):
        axes.plot(*where, color=COLOURS["kept"], marker=marker, ls="none", label=name)
    plain = plan.baseline_peak_bytes / 1e6, 0.0
    axes.plot(*plain, color=COLOURS["plain"], marker="D", ls="none", label="plain")
    chosen = plan.peak_bytes / 1e6, 100 * plan.overhead
    ring: dict[str, Any] = {"mfc": "none", "ms": 13, "mew": 2, "ls": "none"}
    axes.plot(*chosen, color=COLOURS["plan"], marker="o", label="this plan", **ring)
    axes.set_xlim(0, 1.05 * max(x for x, _ in [*curve, chosen]))
    most = max(y for _, y in [*curve, *named.values(), chosen])
    axes.set_ylim(-0.04 * most - 0.5, 1.1 * most + 1)
    axes.set_xlabel("predicted peak, MB")
    axes.set_ylabel("extra cost, %")
    axes.legend(frameon=False, fontsize=TEXT, labelcolor=COLOURS["text"])
    return _done(figure, axes, "What each budget costs", path)


def network(plan: PlanData, path: str | os.PathLike[str] | None = None) -> Figure:
    """The network as a column of layers; see `Plan.plot_graph`."""
    rows, arcs = coarse(plan)
    figure = _figure(1.6 + 0.2 * len(rows))
    left, right = figure.subplots(1, 2, width_ratios=[1, 4])
    places = np.arange(len(rows))
    largest = max((arc.bytes for arc in arcs), default=1)
    for number, arc in enumerate(arcs):
        label = "" if number else "skips layers, wide where large"
        _draw_arc(left, arc.begin, arc.end, 0.4 + 1.8 * arc.bytes / largest, label)
    left.plot(np.zeros(len(rows)), places, color=COLOURS["text"], lw=0.8)
    for row, place in zip(rows, places, strict=True):
        style = "kept" if row.kept else "again" if row.again else "plain"
        left.plot(0, place, "o", ms=5, color=COLOURS[style], mfc=COLOURS[style])
    reach = max((arc.end - arc.begin for arc in arcs), default=1)
    left.set_xlim(-0.55 * reach**0.5 - 0.3, 0.3)
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.set_axis_off()
    before = np.zeros(len(rows))
    for name, label in (("kept", "kept"), ("again", "run again"), ("plain", "not wanted again")):
        sizes = np.array([getattr(row, name) / 1e6 for row in rows])
        right.barh(places, sizes, 0.7, left=before, color=COLOURS[name], label=label)
        before += sizes
    for number, (begin, end) in enumerate(_bands(rows)):
        if number % 2:
            label = "every other segment" if number == 1 else ""
            shade = {"color": COLOURS["text"], "alpha": 0.12, "lw": 0, "label": label}
            right.axhspan(begin - 0.5, end + 0.5, **shade)
    right.set_yticks(places, [facts.shortened(row.label, _LABEL) for row in rows])
    right.set_ylim(len(rows) - 0.5, -0.5)
    right.set_xlabel("MB of activations")
    right.set_xlim(0, 1.04 * max(before, default=1))
    _legend_below(figure, 2)
    return _done(figure, right, _title(plan), path)


def _bands(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """The stretches of consecutive rows of the same segment."""
    bands: list[tuple[int, int]] = []
    for place, row in enumerate(rows):
        if place and row.segment == rows[place - 1].segment:
            bands[-1] = bands[-1][0], place
        else:
            bands.append((place, place))
    return bands


def _draw_arc(axes: Axes, begin: int, end: int, width: float, label: str) -> None:
    middle, half = (begin + end) / 2, (end - begin) / 2
    angle = np.linspace(-np.pi / 2, np.pi / 2, 40)
    depth = 0.55 * (end - begin) ** 0.5
    x, y = -depth * np.cos(angle), middle + half * np.sin(angle)
    axes.plot(x, y, color=COLOURS["plain"], lw=width, alpha=0.7, label=label)


def _mark_copies(axes: Axes, times: np.ndarray, copies: np.ndarray, top: float) -> None:
    """A band below the curves where ops run again."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], copies, [False]]).astype(int)))
    spans = [(times[a], times[b] - times[a]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    if spans:
        axes.broken_barh(
            spans, (-0.05 * top, 0.035 * top), color=COLOURS["again"], label="run again"
        )


def _legend_below(figure: Figure, columns: int) -> None:
    figure.legend(
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=TEXT,
        labelcolor=COLOURS["text"],
    )


def _percent(costs: np.ndarray, total: float) -> np.ndarray:
    """When each run begins, and the end, in % of the plain step."""
    return 100 * np.append(0.0, costs.cumsum()) / total


def _thinned(times: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """No more points than can be seen; each is the highest of those it replaces."""
    begins = np.unique(np.linspace(0, len(held), _POINTS, endpoint=False).astype(int))
    held = np.maximum.reduceat(held, begins)
    return np.append(times[begins], times[-1]), np.append(held, held[-1])


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _undominated(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto-optimal points: no other point is better in both coordinates."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _title(plan: PlanData) -> str:
    ratio = plan.baseline_peak_bytes / max(plan.peak_bytes, 1)
    less, more = f"{ratio:.1f}× less memory", f"{plan.overhead:.0%} more computing"
    return f"{plan.strategy}: {less}, {more} (estimated)"


def check_matplotlib() -> None:
    """Raises an ImportError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "pictures of a plan need matplotlib: pip install 'memory_saving_gradients[plot]'"
        )


def _figure(height: float) -> Figure:
    check_matplotlib()
    from matplotlib.figure import Figure as Plain

    class Shown(Plain):
        """A figure that a notebook shows, whatever the backend of pyplot."""

        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Shown(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
    figure.patch.set_alpha(0.0)
    return figure


def _done(figure: Figure, axes: Axes, title: str, path: str | os.PathLike[str] | None) -> Figure:
    """The finished figure; it is written to a file if there is a path."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=TEXT, color=COLOURS["text"])
    axes.patch.set_alpha(0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(COLOURS["text"])
    axes.tick_params(colors=COLOURS["text"], labelsize=TEXT)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=COLOURS["text"], fontsize=TEXT)
    if path is not None:
        figure.savefig(path)
    return figure
