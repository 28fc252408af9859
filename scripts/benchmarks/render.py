"""Fills the tables of README.md and docs/ from the JSON beside this file, and draws the figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from memory_saving_gradients import Plan, get_plans, gradients_memory
from scripts.benchmarks import figures, tables
from scripts.benchmarks.run import NAMES
from test_models import CifarResNet, Model, UNet, build_v1

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"


def plan_of(model: Model, batch: int) -> Plan:
    with tf.Graph().as_default():
        step = build_v1(model, batch)
        gradients_memory(step.loss, step.variables)
        return get_plans()[-1]


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def main() -> None:
    files = {name: read(name) for name in NAMES}
    results = {name: file["results"] for name, file in files.items()}
    taken = files["models"]
    on = f"{taken['machine']}, TensorFlow {taken['versions']['tensorflow']}"
    machine = (
        f"Measured on {on}, in a default session: oneDNN on, all threads, "
        "nothing else running; times against plain in the same process, in turns, with quartiles."
    )
    filled = {
        "few": tables.few_table(results["models"]),
        "compare": tables.compare_table(results["compare"]),
        "compare notes": tables.compare_notes(results["compare"], on),
        "models": tables.models_table(results["models"], results["laboratory"]),
        "gradients": tables.gradients_table(results["gradients"]),
        "keras": tables.keras_table(results["keras_fit"]["graph"]),
        "keras compiled": tables.keras_table(results["keras_fit"]["compiled"]),
        "keras notes": tables.keras_notes(
            results["keras_fit"], files["keras_fit"]["versions"]["keras"]
        ),
        "xla gpu": tables.xla_table(results["xla"], "h100"),
        "xla cpu": tables.xla_table(results["xla"], "cpu"),
        "xla jax": tables.jax_table(results["xla"]),
        "xla gate": tables.gate_cost(results["xla"]),
        "xla work": tables.work_table(results["xla"]),
        "eager": tables.eager_table(results["eager"]),
        "goals": tables.goals_table(results["models"]),
        "predictions": tables.predictions_table(results["models"]),
        "rewriting": tables.rewriting_table(results["models"]),
        "demo": tables.demo_table(results["depth"]["sweeps"]["demo"]),
        "deep": tables.demo_table(results["depth"]["sweeps"]["deep"]),
        "published": tables.published_table(results["planning"]),
        "over optimal": tables.over_optimal_table(results["planning"]),
        "machine": machine,
    }
    for page in (ROOT / "README.md", DOCS / "results.md", DOCS / "by-hand.md"):
        text = page.read_text()
        for name, content in filled.items():
            begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
        page.write_text(text)
    (DOCS / "budgets.md").write_text(
        f"# Plans within budgets\n\n{machine} A budget is a share of the predicted plain peak.\n\n"
        f"{tables.budgets_table(results['models'])}\n"
    )
    (DOCS / "corpus.md").write_text(
        "# Budgets on the hard graphs\n\nMeasured peaks as shares of the budget, the lowest and "
        "the highest of four settings: oneDNN on and off, one inter-op thread and all. A budget is "
        "a share of the predicted plain peak.\n\n"
        f"{tables.corpus_table(results['corpus'])}\n"
    )
    resnet = plan_of(CifarResNet(56), 128)
    resnet.plot(FIGURES / "timeline.png")
    resnet.plot_frontier(FIGURES / "frontier.png")
    plan_of(UNet(), 4).plot_graph(FIGURES / "network.png")
    figures.draw_compare(results["compare"], FIGURES / "compare.png")
    figures.draw_frontiers(results["planning"], FIGURES / "frontiers.png")
    figures.draw_scaling(results["planning"], FIGURES / "scaling.png")


if __name__ == "__main__":
    main()
