"""Mutation testing of the planners: do their tests fail when the code is wrong?

Cosmic Ray changes one thing at a time in `memory_saving_gradients/planning`, in a copy of this
folder, and runs `tests/planning`. Of thousands of mutants some are drawn by chance, as each takes a
minute or two. Writes benchmarks/mutations.json with those that no test noticed; `--again` tries
these once more, when tests have been written for them.

    pip install cosmic-ray
    python -m scripts.mutations --count 100
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "scripts" / "benchmarks" / "mutations.json"
COPIED = ("memory_saving_gradients", "scripts", "test_models", "tests", "pyproject.toml")
TESTS = "-x -q -p no:cacheprovider -n 2 --dist worksteal -m 'not slow' tests/planning"

CONFIG = """
[cosmic-ray]
module-path = "memory_saving_gradients/planning"
timeout = 240.0
excluded-modules = []
test-command = "{python} -m pytest {tests}"

[cosmic-ray.distributor]
name = "local"
"""


def name_of(item: Any) -> str:
    """What tells a mutant from others."""
    one = item.mutations[0]
    return f"{one.module_path.name} {one.operator_name} {one.occurrence}"


def only(session: Path, chosen: Callable[[list[Any]], Collection[Any]]) -> int:
    """Leaves the chosen mutants of a session to be tried; how many there are in all."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(session, WorkDB.Mode.open) as database:
        items = sorted(database.pending_work_items, key=name_of)
        tried = {item.job_id for item in chosen(items)}
        for item in items:
            if item.job_id not in tried:
                skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
                database.set_result(item.job_id, skipped)
    return len(items)


def survivors(session: Path) -> tuple[int, list[dict[str, Any]]]:
    """How many mutants were tried, and those that no test noticed."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome

    with use_db(session, WorkDB.Mode.open) as database:
        results = dict(database.results)
        items = [
            (item, results[item.job_id])
            for item in database.work_items
            if item.job_id in results
            and results[item.job_id].worker_outcome != WorkerOutcome.SKIPPED
        ]
    lived = [
        {
            "name": name_of(item),
            "line": item.mutations[0].start_pos[0],
            "diff": [line for line in (result.diff or "").splitlines() if line[:1] in "+-"][3:],
        }
        for item, result in items
        if result.test_outcome == TestOutcome.SURVIVED
    ]
    return len(items), lived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="try those that survived last time")
    options = parser.parse_args()
    before = json.loads(OUTPUT.read_text()) if options.again else {}

    def chosen(items: list[Any]) -> Collection[Any]:
        if before:
            wanted = {one["name"] for one in before["survivors"]}
            return [item for item in items if name_of(item) in wanted]
        return random.Random(options.seed).sample(items, min(options.count, len(items)))

    tool = [sys.executable, "-m", "cosmic_ray.cli"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        config, session = folder / "mutations.toml", folder / "session.sqlite"
        config.write_text(CONFIG.format(python=sys.executable, tests=TESTS))
        environment = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run([*tool, "init", str(config), str(session)], cwd=folder, check=True)
        mutants = only(session, chosen)
        subprocess.run(
            [*tool, "exec", str(config), str(session)], cwd=folder, env=environment, check=True
        )
        tried, lived = survivors(session)
    tried = before.get("tried", tried)
    results = {"mutants": mutants, "tried": tried, "survivors": lived}
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{tried - len(lived)} of {tried} mutants were noticed")


if __name__ == "__main__":
    main()
