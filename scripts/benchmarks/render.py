"""Fills the tables of README.md and docs/ from the JSON beside this file, and draws the figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from memory_saving_gradients import Plan, get_plans, gradients_memory
from scripts.benchmarks import figures, tables
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


def main() -> None:
    def read(name: str) -> dict:
        return json.loads((RESULTS / f"{name}.json").read_text())

    benchmark, planning, fit, compare = map(read, ("models", "planning", "keras_fit", "compare"))
    machine = (
        f"Measured on {benchmark['machine']}, in a default session: oneDNN on, all threads, "
        "nothing else running; times against plain in the same process, in turns, with quartiles."
    )
    filled = {
        "few": tables.few_table(benchmark),
        "compare": tables.compare_table(compare),
        "compare notes": tables.compare_notes(compare),
        "models": tables.models_table(benchmark, read("laboratory")),
        "gradients": tables.gradients_table(read("gradients")),
        "keras": tables.keras_table(fit["graph"]),
        "keras compiled": tables.keras_table(fit["compiled"]),
        "keras notes": tables.keras_notes(fit),
        "xla gpu": tables.xla_table(read("xla"), "h100"),
        "xla cpu": tables.xla_table(read("xla"), "cpu"),
        "xla jax": tables.jax_table(read("xla")),
        "xla gate": tables.gate_cost(read("xla")),
        "xla work": tables.work_table(read("xla")),
        "eager": tables.eager_table(read("eager")),
        "goals": tables.goals_table(benchmark),
        "predictions": tables.predictions_table(benchmark),
        "rewriting": tables.rewriting_table(benchmark),
        "demo": tables.demo_table(read("demo")),
        "deep": tables.demo_table(read("deep_resnet")),
        "published": tables.published_table(planning),
        "over optimal": tables.over_optimal_table(planning),
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
        f"{tables.budgets_table(benchmark)}\n"
    )
    (DOCS / "corpus.md").write_text(
        "# Budgets on the hard graphs\n\nMeasured peaks as shares of the budget, the lowest and "
        "the highest of four settings: oneDNN on and off, one inter-op thread and all. A budget is "
        "a share of the predicted plain peak.\n\n"
        f"{tables.corpus_table(read('corpus'))}\n"
    )
    resnet = plan_of(CifarResNet(56), 128)
    resnet.plot(FIGURES / "timeline.png")
    resnet.plot_frontier(FIGURES / "frontier.png")
    plan_of(UNet(), 4).plot_graph(FIGURES / "network.png")
    figures.draw_compare(compare, FIGURES / "compare.png")
    figures.draw_frontiers(planning, FIGURES / "frontiers.png")
    figures.draw_scaling(planning, FIGURES / "scaling.png")


if __name__ == "__main__":
    main()
