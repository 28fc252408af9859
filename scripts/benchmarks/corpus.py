"""Measures budgets on the hard graphs of tests/corpus.py: does a run keep them, in every setting?

A setting is oneDNN on or off, and one inter-op thread or as many as there are cores. Writes
corpus.json beside this file, from which scripts/benchmarks/render.py makes a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

OUTPUT = Path(__file__).with_name("corpus.json")
SHARES = (0.7, 0.5, 0.3)
RUNS = 3  # the highest peak counts


def measure_all(threads: int, only: list[str]) -> dict[str, dict]:
    """By graph: predicted and measured bytes of every budget."""
    import numpy as np
    import tensorflow as tf
    from rich.console import Console
    from rich.progress import track

    from memory_saving_gradients import BudgetError, get_plans, gradients
    from memory_saving_gradients.measure import session_peak
    from test_models import build_v1
    from tests.corpus import CORPUS, LARGE

    v1 = tf.compat.v1
    tf.config.threading.set_inter_op_parallelism_threads(threads)

    def row(name: str, budget: float | str) -> dict | None:
        make, batch = CORPUS[name]
        with tf.Graph().as_default() as graph:
            model = make()
            step = build_v1(model, batch)
            try:
                grads = gradients(step.loss, step.variables, memory_budget=budget)
            except BudgetError as error:
                return {"lowest": error.lowest_peak_bytes}
            fetches = [g for g in tf.nest.flatten(grads, expand_composites=True) if g is not None]
            (plan,) = get_plans(graph) or (None,)
            if plan is None:
                return None
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.tables_initializer()])
                feed = step.feed(model.example(batch))
                session.run(fetches, feed)
                peaks = [session_peak(session, fetches, feed) for _ in range(RUNS)]
            return {
                "budget": plan.budget_bytes,
                "predicted": plan.peak_bytes,
                "measured": int(np.max(peaks)),
            }

    found: dict[str, dict] = {}
    names = only or [name for name in CORPUS if name not in LARGE]
    for name in track(names, "graphs", console=Console(stderr=True)):
        found[name] = {f"{share:g}": row(name, share) for share in SHARES}
        lowest = (row(name, 0.01) or {}).get("lowest")
        if lowest:
            found[name]["lowest"] = row(name, f"{lowest}B")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="keep the other results")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads is not None:
        print(json.dumps(measure_all(options.threads, options.only)))
        return
    results: dict[str, dict] = json.loads(OUTPUT.read_text()) if options.only else {}
    for onednn, threads in itertools.product("10", "10"):
        environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": onednn, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-W", "ignore", "-m", "scripts.benchmarks.corpus"]
        command += ["--threads", threads, *(["--only", *options.only] if options.only else [])]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        for name, rows in json.loads(done.stdout.splitlines()[-1]).items():
            results.setdefault(name, {})[f"oneDNN {onednn}, threads {threads}"] = rows
        OUTPUT.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
