"""A plan as text: tables for a terminal, a log file or a notebook, and one short paragraph."""

from __future__ import annotations

import io
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.report import facts, layers

# The width if there is no terminal.
_WIDTH = 120
# Small rows that together hold at most this share are merged into one.
_NEGLIGIBLE = 0.02
# More tensors than this that are read right after the loss are merged into one row.
_FEW = 4
# The most characters of the name of the last of them.
_END = 20
# The most rows of tensors alive at the peak.
_HOLDERS = 8


def short(plan: PlanData) -> str:
    """The plan in a few lines, for logs: what it saves, keeps and recomputes."""
    parts = facts.segments(plan)
    peak = facts.at_peak(plan)
    kinds = ", ".join(f"{_mb(size)} {kind}" for kind, size in list(peak.by_kind.items())[:3])
    return (
        f"{plan}\n"
        f"keeps {len(plan.checkpoints)} tensors, runs {len(parts)} segments again; "
        f"the peak is at {peak.origin} (MB: {kinds})"
    )


def text(plan: PlanData, file: IO[str] | None = None) -> str:
    """The tables as text, formatted for `file` if that is a terminal."""
    return rendered(_tables(plan), file)


def rendered(shown: RenderableType, file: IO[str] | None = None) -> str:
    """A rich object as text, as wide as the terminal `file`, or else 120 columns."""
    out = io.StringIO()
    terminal = Console(file=file, force_jupyter=False)
    width = terminal.width if terminal.is_terminal else _WIDTH
    colours = terminal.color_system if terminal.is_terminal else None
    console = Console(
        file=out,
        width=width,
        force_terminal=terminal.is_terminal,
        color_system=colours,  # type: ignore[arg-type]
        force_jupyter=False,  # else it would display itself in a notebook
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def html(plan: PlanData) -> str:
    """The tables for a notebook."""
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
    console.print(_tables(plan))
    style = "font-family:monospace;line-height:1.2;white-space:pre;overflow-x:auto"
    return console.export_html(
        inline_styles=True, code_format=f'<pre style="{style}"><code>{{code}}</code></pre>'
    )


def _tables(plan: PlanData) -> RenderableType:
    parts = facts.segments(plan)
    peak = facts.at_peak(plan)
    return Group(
        Text(f"{plan}", style="bold"),
        _layers(plan),
        _kept(plan),
        _recomputed(plan, parts),
        *([_loops(plan)] if plan.loops else []),
        *([_pieces(plan)] if plan.pieces else []),
        _peak(parts, peak),
        _totals(plan, parts),
    )


def _table(title: str, **columns: str) -> Table:
    """A table. For each column the alignment, or "fill" to share the remaining width."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, expand=True)
    for name, how in columns.items():
        heading = name.replace("_", " ")
        if how == "fill":
            table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            table.add_column(heading, justify=how, no_wrap=True)  # type: ignore[arg-type]
    return table


def _layers(plan: PlanData) -> RenderableType:
    rows, _ = layers.coarse(plan)
    table = _table(
        "The forward pass, from the first layer to the last",
        layer="fill",
        MB_kept="right",
        MB_run_again="right",
        segment="right",
        extra_cost="right",
    )
    for row in rows:
        again = [_mb(row.again), str(row.segment), f"{row.overhead:.1%}"] if row.again else [""] * 3
        table.add_row(Text(row.label), _mb(row.kept) if row.kept else "", *again)
    return table


def _kept(plan: PlanData) -> RenderableType:
    rows = facts.kept(plan)
    total = sum(row.bytes for row in rows)
    least = _least([row.bytes for row in rows])
    within = f", in {plan.labels.common.rstrip('/')}" if plan.labels.common else ""
    table = _table(
        f"Kept for the backward pass: {len(rows)} tensors, {_mb(total)} MB{within}",
        tensor="fill",
        made_by="fill",
        shape="left",
        dtype="left",
        MB="right",
        why="left",
    )
    soon = [row for row in rows if row.why == facts.SOON]
    if len(soon) <= _FEW:
        soon = []
    for row in rows:
        if row.bytes >= least and row not in soon:
            name = row.tensor.removeprefix(plan.labels.common).removeprefix(f"{row.origin}/")
            cells = [name, row.origin, row.shape, row.dtype, _mb(row.bytes), row.why]
            table.add_row(*map(Text, cells))
    if soon:
        end = f"to {facts.shortened(soon[-1].origin, _END)}"
        size = _mb(sum(row.bytes for row in soon))
        cells = [f"{len(soon)} tensors", soon[0].origin, end, "", size, facts.SOON]
        table.add_row(*map(Text, cells))
    rows = [row for row in rows if row not in soon]
    small = [row.bytes for row in rows if row.bytes < least]
    if small:
        table.add_row(
            f"and {len(small)} small one{'s' if len(small) > 1 else ''}",
            "",
            "",
            "",
            _mb(sum(small)),
            "",
        )
    return table


def _recomputed(plan: PlanData, parts: list[facts.Segment]) -> RenderableType:
    if not parts:
        loops = any(loop.every for loop in plan.loops)
        return Text("Outside loops nothing runs again.\n" if loops else "Nothing runs again.\n")
    table = _table(
        f"Run again: {len(parts)} segments, in the order of the backward pass",
        segment="right",
        first="fill",
        last="fill",
        ops="right",
        MB_freed="right",
        extra_cost="right",
    )
    for number, part in enumerate(parts, 1):
        last = part.last if len(part.ops) > 1 else ""
        cells = [str(number), part.first, last, str(len(part.ops)), _mb(part.bytes)]
        table.add_row(*map(Text, cells), f"{part.overhead:.1%}")
    return table


def _peak(parts: list[facts.Segment], peak: facts.Moment) -> RenderableType:
    number = next((n for n, part in enumerate(parts, 1) if peak.entry in part.entries), None)
    again = f", in segment {number}" if number else ""
    table = _table(
        f"Alive at the peak, {_mb(peak.bytes)} MB, while {peak.op} runs{again}",
        what="left",
        of="fill",
        MB="right",
        share="right",
    )
    for held in peak.held[:_HOLDERS]:
        share = f"{held.bytes / max(peak.bytes, 1):.0%}"
        table.add_row(held.kind, Text(held.origin), _mb(held.bytes), share)
    rest = sum(held.bytes for held in peak.held[_HOLDERS:])
    if rest:
        table.add_row("the rest", "", _mb(rest), f"{rest / max(peak.bytes, 1):.0%}")
    return table


def _loops(plan: PlanData) -> RenderableType:
    table = _table(
        "Loops, and the rounds of the segments that run again",
        loop="fill",
        rounds="right",
        segment="right",
        tensors_kept="right",
        MB_plain="right",
        MB_held="right",
        why_not="left",
    )
    for loop in plan.loops:
        segment = f"{loop.every} / {loop.within}" if loop.within else f"{loop.every or '-'}"
        able = [f"{loop.rounds:,}", segment, f"{len(loop.kept) or '-'}"]
        held = [_mb(loop.plain_bytes), _mb(loop.held_bytes)]
        _add_able(table, loop.name, [*able, *held], loop.why)
    return table


def _add_able(table: Table, name: str, cells: list[str], why_not: str) -> None:
    """Adds a row for what can be changed, or that says why it cannot."""
    table.add_row(Text(name), *([""] * len(cells) if why_not else cells), Text(why_not))


def _pieces(plan: PlanData) -> RenderableType:
    table = _table(
        "In pieces: what is computed row by row around the largest tensors",
        tensor="fill",
        rows="right",
        pieces="right",
        MB_whole="right",
        MB_a_piece="right",
        backward="left",
        why_not="left",
    )
    for one in plan.pieces:
        sizes = [f"{one.rows:,}", f"{one.pieces}", _mb(one.bytes), _mb(one.bytes // one.pieces)]
        how = "at once" if one.at_once else "forward again"
        _add_able(table, one.name, [*sizes, how], one.why)
    return table


def _totals(plan: PlanData, parts: list[facts.Segment]) -> RenderableType:
    ratio = plan.baseline_peak_bytes / max(plan.peak_bytes, 1)
    labels = plan.labels
    lines = {
        "plain peak": f"{_mb(plan.baseline_peak_bytes)} MB",
        "peak": f"{_mb(plan.peak_bytes)} MB ({ratio:.2f}x less), as predicted",
        "measured peak": f"{_mb(plan.measured_peak_bytes or 0)} MB",
        "process": f"{_mb(plan.process_peak_bytes or 0)} MB in that run",
        "compiled peak": f"{plan.compiled}, by XLA's compiler for {plan.compiled_for}",
        "budget": f"{_mb(plan.budget_bytes or 0)} MB",
        "extra cost": f"{plan.overhead:z.1%} of the step's estimated time, "
        f"{len(plan.recomputed)} ops in {len(parts)} segments",
        "updates": f"wait for {labels.waited_for}: {_mb(facts.most_of_weights(plan))} MB of "
        "gradients of weights live at once",
        "sums": f"{len(labels.reordered)} add their terms in another order: equal to those of the "
        "plain step to rounding",
        "batch": f"{plan.batch_size}{' (assumed: say batch_size=)' if plan.batch_assumed else ''}",
    }
    absent = {
        "measured peak": plan.measured_peak_bytes is None,
        "process": plan.process_peak_bytes is None,
        "compiled peak": plan.compiled_peak_bytes is None,
        "budget": plan.budget_bytes is None,
        "updates": not labels.waited_for,
        "sums": not labels.reordered,
        "batch": plan.batch_size is None,
    }
    shown = {name: line for name, line in lines.items() if not absent.get(name)}
    return Text("\n".join(f"{name + ':':15} {line}" for name, line in shown.items()))


def _least(sizes: list[int]) -> int:
    """The size below which rows are merged into one."""
    held = 0
    for size in sorted(sizes):
        held += size
        if held > _NEGLIGIBLE * sum(sizes):
            return size
    return 0


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"
