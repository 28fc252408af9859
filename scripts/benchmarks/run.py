"""Takes the numbers of the documentation, and writes them beside this file as JSON.

`python -m scripts.benchmarks.run` runs every benchmark, which takes about two hours, while nothing
else should run; names run some. Each row is taken in a fresh process. The files say of which commit
they are. `python -m scripts.benchmarks.render` makes the tables and figures from them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts.benchmarks.fresh import fresh
from scripts.benchmarks.stamp import stamp

HERE = Path(__file__).resolve().parent

#: Each is a module here, with its sections, and a file of results.
NAMES = ("models keras_fit planning compare loops pieces eager depth corpus kernels xla").split()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument(
        "--only", nargs="+", metavar="LABEL", help="rows that begin so; the file keeps the others"
    )
    parser.add_argument("--output", type=Path, default=HERE, help="the folder to write to")
    options = parser.parse_args(arguments)
    if unknown := set(options.names).difference(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}, but {', '.join(NAMES)}")
    options.names = options.names or NAMES
    options.rows = {name: list(rows(name, options.only)) for name in options.names}
    if not any(options.rows.values()):
        parser.error(f"no row begins with {' or '.join(options.only)}")
    return options


def rows(name: str, only: list[str] | None) -> Iterator[tuple[str, Any, str]]:
    """The rows of a benchmark that begin so: name of the section, section, label."""
    begin = tuple(text.lower() for text in only or [""])
    for title, section in importlib.import_module(f"scripts.benchmarks.{name}").SECTIONS.items():
        for label in section.labels:
            if label.lower().startswith(begin):
                yield title, section, label


def started(path: Path, keep: bool) -> dict[str, Any]:
    """What a file of results begins with: its rows, if they are kept.

    Raises:
        SystemExit: they are of another commit.
    """
    content = stamp() | {"results": {}}
    if keep and path.exists():
        before = json.loads(path.read_text())
        if before["commit"] != content["commit"]:
            raise SystemExit(
                f"{path.name} was taken at {before['commit']}, and this is {content['commit']}: "
                "take all of it."
            )
        content["results"] = before["results"]
    return content


def main(arguments: Sequence[str] | None = None) -> None:
    options, console, failed = parse(arguments), Console(soft_wrap=True), []
    for name, chosen in options.rows.items():
        path = options.output / f"{name}.json"
        content = started(path, keep=options.only is not None)
        began = time.perf_counter()
        for title, section, label in chosen:
            console.rule(f"{name}, {title}: {label}")
            try:
                row = fresh(section.measure, label, **section.environment)
            except subprocess.CalledProcessError:  # it has said why
                failed.append(f"{name}, {title}: {label}")
                continue
            console.print_json(json.dumps(row))
            console.print(f"{(time.perf_counter() - began) / 60:.0f} min of {name}")
            content["results"].setdefault(title, {})[label] = row
            path.write_text(json.dumps(content, indent=1) + "\n")
    if failed:
        raise SystemExit("\n".join(["These failed:", *failed]))


if __name__ == "__main__":
    main()
