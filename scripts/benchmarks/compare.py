"""Compares this package with other ways to recompute, in a default configuration.

Those on TensorFlow are told in scripts/benchmarks/peers_tensorflow.py. JAX and PyTorch, where they
are installed, run the same network by `jax.checkpoint` and `torch.utils.checkpoint`; their peaks
are from their own reports, and their gradients are checked against their own plain ones.

Writes compare.json beside this file, from which scripts/benchmarks/render.py makes a table and a
figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.benchmarks.peers_tensorflow import (
    COMPARED,
    FUNCTIONS,
    PEERS,
    Row,
    in_functions,
    in_keras,
    in_sessions,
    verdict,
)


def elsewhere(
    network: str | None, framework: str, python: str, rounds: int, tick: Callable[[str], object]
) -> list[Row]:
    """The same network on another framework; no rows where that, or the network, is not there."""
    tick(framework)
    if network is None:
        return []
    module = f"scripts.benchmarks.peers_{framework}"
    command = [python, "-m", module, network, str(rounds)]
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if ran.returncode == 0:
        return [Row(**row) for row in json.loads(ran.stdout.splitlines()[-1])]
    last = ran.stderr.strip().splitlines()[-1:]
    if any("ModuleNotFoundError" in line for line in last):
        return []
    return [Row(framework, framework, error=" ".join(last))]


def table(label: str, rows: Sequence[Row]) -> Table:
    """The rows of a model as a table."""
    shown = Table(title=label, title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("way", no_wrap=True)
    for heading in ("peak MB", "ratio", "time"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("gradients")
    peaks = {row.peer: row.peak_bytes for row in rows}
    for row in rows:
        plain = peaks.get(row.plain)
        cells = ["-", "-", "-", f"fails: {row.error}"]
        if row.peak_bytes:
            cells = [
                f"{row.peak_bytes / 1e6:,.0f}",
                f"{plain / row.peak_bytes:.1f}x" if plain else "-",
                "-" if row.time_ratio is None else f"{row.time_ratio:.2f}x",
                verdict(row),
            ]
        shown.add_row(row.peer, *cells, end_section=row is rows[-1])
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    description, *rest = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.compare", description=description, epilog="".join(rest)
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"beginnings of names: {'; '.join(COMPARED)} (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="steps timed, in turns")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="an interpreter that has JAX or PyTorch, where this one has not",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_suffix(".json"), help="JSON to write"
    )
    options = parser.parse_args(arguments)
    wanted = [name.lower() for name in options.models] or [""]
    chosen = [label for label in COMPARED if label.lower().startswith(tuple(wanted))]
    for name in wanted:
        if not any(label.lower().startswith(name) for label in COMPARED):
            parser.error(f"no model begins with {name!r}; there are: {'; '.join(COMPARED)}")
    console = Console()
    results: dict[str, Any] = {"models": {}}
    if options.output.exists() and options.models:
        results = json.loads(options.output.read_text())
    results["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}"
    )
    with Progress(console=console, transient=True) as progress:
        for label in chosen:
            task = progress.add_task(label, total=len(PEERS) + len(FUNCTIONS) + 5)

            def tick(what: str, task: Any = task, label: str = label) -> None:
                progress.update(task, advance=1, description=f"{label}: {what}")

            step, keras_label, network = COMPARED[label]
            rows = in_sessions(*step, options.rounds, tick)
            rows += in_functions(label, options.rounds, tick)
            rows += in_keras(keras_label, tick)
            for framework in ("jax", "torch"):
                rows += elsewhere(network, framework, options.python, options.rounds, tick)
            progress.remove_task(task)
            console.print(table(label, rows))
            results["models"][label] = [dataclasses.asdict(row) for row in rows]
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Written: {options.output}")


if __name__ == "__main__":
    main()
