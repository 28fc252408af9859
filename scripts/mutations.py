"""Mutation testing of the planners: do their tests fail when the code is wrong?

Cosmic Ray changes one thing at a time in `memory_saving_gradients/planning`, in a copy of this
folder, and runs `tests/planning`. Of thousands of mutants some are drawn by chance, as each takes a
minute. Writes benchmarks/mutations.json with those that no test noticed.

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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "scripts" / "benchmarks" / "mutations.json"
COPIED = ("memory_saving_gradients", "scripts", "test_models", "tests", "pyproject.toml")

CONFIG = """
[cosmic-ray]
module-path = "memory_saving_gradients/planning"
timeout = 240.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider -m 'not slow' tests/planning"

[cosmic-ray.distributor]
name = "local"
"""


def drawn(session: Path, count: int, seed: int) -> int:
    """Leaves so many mutants of a session to be tried; how many there are in all."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(session, WorkDB.Mode.open) as database:
        jobs = [item.job_id for item in database.pending_work_items]
        tried = set(random.Random(seed).sample(jobs, min(count, len(jobs))))
        for job in jobs:
            if job not in tried:
                skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
                database.set_result(job, skipped)
    return len(jobs)


def outcomes(session: Path, tool: list[str], folder: Path) -> Iterator[tuple[dict, dict]]:
    """The mutations that were tried, each with what came of it."""
    dump = subprocess.run(
        [*tool, "dump", str(session)], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    for line in dump.stdout.splitlines():
        item, result = json.loads(line)
        if result and result["worker_outcome"] != "skipped":
            yield item["mutations"][0], result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tool = [sys.executable, "-m", "cosmic_ray.cli"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        config, session = folder / "mutations.toml", folder / "session.sqlite"
        config.write_text(CONFIG.format(python=sys.executable))
        environment = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run([*tool, "init", str(config), str(session)], cwd=folder, check=True)
        total = drawn(session, options.count, options.seed)
        subprocess.run(
            [*tool, "exec", str(config), str(session)], cwd=folder, env=environment, check=True
        )
        found = list(outcomes(session, tool, folder))
    survivors = [
        {
            "file": Path(mutation["module_path"]).name,
            "line": mutation["start_pos"][0],
            "operator": mutation["operator_name"],
            "diff": result["diff"],
        }
        for mutation, result in found
        if result["test_outcome"] == "survived"
    ]
    results = {"mutants": total, "tried": len(found), "survivors": survivors}
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(found) - len(survivors)} of {len(found)} mutants were noticed")


if __name__ == "__main__":
    main()
