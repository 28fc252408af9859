"""Figures of every test model: drawn, uncrowded, readable on white and on black."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib.colors
import pytest

from memory_saving_gradients.report import figures
from memory_saving_gradients.report.layers import ROWS, coarse
from tests.report.plans import CASES, plan_of


def luminance(colour):
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117", "#1e1e1e"])
@pytest.mark.parametrize("name", figures.COLOURS)
def test_colours_are_readable(name, page):
    """By the contrast of WCAG: 3 for graphics, on paper and on dark pages."""
    levels = [luminance(matplotlib.colors.to_rgb(c)) for c in (figures.COLOURS[name], page)]
    assert (max(levels) + 0.05) / (min(levels) + 0.05) >= 3


@pytest.mark.parametrize("name", CASES)
def test_the_course_of_the_step(name, tmp_path):
    plan = plan_of(name)
    figure = plan.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    curves = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    plain, planned = (max(line.get_ydata()) * 1e6 for line in curves)
    assert plain == pytest.approx(plan.baseline_peak_bytes)
    assert planned == pytest.approx(plan.peak_bytes)
    assert curves[1].get_xdata()[-1] == pytest.approx(100 * (1 + plan.overhead))
    assert nothing_overlaps(figure)
    assert readable_on_a_phone(figure)
    legend = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    assert ("budget" in legend) == (plan.budget_bytes is not None)


@pytest.mark.parametrize("name", CASES)
def test_the_network(name, tmp_path):
    plan = plan_of(name)
    figure = plan.plot_graph(tmp_path / "graph.svg")
    ElementTree.parse(tmp_path / "graph.svg")
    rows, arcs = coarse(plan)
    assert 1 < len(rows) <= ROWS
    sizes = sum(row.kept + row.again + row.plain for row in rows)
    problem = plan.problem
    made = {t for op in problem.ops[: problem.forward_count] for t in op.outputs}
    assert sizes == sum(problem.tensors[t].bytes for t in made)
    assert all(0 <= arc.begin < arc.end - 1 < len(rows) for arc in arcs)
    assert nothing_overlaps(figure)
    assert readable_on_a_phone(figure)


def all_texts(figure):
    figure.draw_without_rendering()
    shown = [axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)]
    texts = [tick.label1 for axis in shown for tick in axis._update_ticks()]  # those within limits
    texts += [axis.label for axis in shown]
    texts += [text for axes in figure.axes for text in axes.texts]
    legends = [*figure.legends, *(axes.legend_ for axes in figure.axes if axes.legend_)]
    texts += [text for legend in legends for text in legend.get_texts()]
    return [*texts, figure._suptitle]


def readable_on_a_phone(figure):
    """Whether letters are 8 pixels high or more where a page of 390 leaves 358 to the figure."""
    pixels = 358 / figure.get_figwidth() / 72
    return all(text.get_fontsize() * pixels >= 8 for text in all_texts(figure) if text.get_text())


def nothing_overlaps(figure):
    """Whether no two texts of a figure lie over each other, and none is cut off."""
    texts = all_texts(figure)
    boxes = [t.get_window_extent() for t in texts if t.get_text()]
    page = figure.bbox.padded(1)
    inside = all(page.containsx(b.x0) and page.containsx(b.x1) for b in boxes)
    apart = not any(
        one.padded(-1).overlaps(other.padded(-1))
        for i, one in enumerate(boxes)
        for other in boxes[:i]
    )
    return inside and apart


def test_the_frontier_has_the_plan_on_it():
    plan = plan_of("resnet20", "speed")
    figure = plan.plot_frontier()
    assert readable_on_a_phone(figure)
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    (chosen,) = lines["this plan"]
    assert chosen == pytest.approx([plan.peak_bytes / 1e6, 100 * plan.overhead])
    assert lines["speed"][0] == pytest.approx(chosen)
    budgets = lines["budgets"]
    assert len(budgets) > 3
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(budgets))
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.measured
def test_without_matplotlib_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from tests.report.plans import CASES, plan_of\n"
        "try: plan_of('chain').plot()\n"
        "except ImportError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'memory_saving_gradients[plot]'" in ran.stdout
