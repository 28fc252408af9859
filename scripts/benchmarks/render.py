"""Fills the tables of README.md and docs/ from the JSON beside this file, and draws the figures."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from memory_saving_gradients import Plan, get_plans, gradients_memory
from scripts.benchmarks import figures, notes, tables
from scripts.benchmarks.fresh import ROOT
from scripts.benchmarks.run import NAMES
from test_models import CifarResNet, Model, UNet, build_v1

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


def texts(files: dict[str, dict], mixed: bool) -> dict[str, str]:
    """What goes between the marks of the pages."""
    results = {name: file["results"] for name, file in files.items()}
    taken = notes.taken({name: files[name] for name in NAMES}, mixed)
    return {
        "machine": f"{notes.machine(files['models'])} {taken}",
        "few": tables.few_table(results["models"]),
        "compare": tables.compare_table(results["compare"]),
        "compare notes": notes.compare(results["compare"]),
        "models": tables.models_table(results["models"]),
        "models notes": notes.models(results["models"]),
        "corpus": notes.corpus(results["corpus"]),
        "keras": tables.keras_table(results["keras_fit"]["models"]),
        "keras notes": notes.keras(files["keras_fit"]),
        "xla": tables.xla_table(results["xla"]),
        "xla notes": notes.xla(results["xla"]),
        "gpu": tables.gpu_table(results["gpu"]),
        "gpu jax": tables.gpu_beside_jax(results["gpu"]),
        "gpu notes": notes.gpu(files["gpu"]),
        "depth": notes.depth(results["depth"]),
        "predictions": tables.predictions_table(results["models"]),
        "planning": notes.planning(results["models"], results["planning"]),
        "loops": tables.loops_table(results["loops"]["networks"]),
        "loops jax": tables.loops_beside_jax(results["loops"]),
        "pieces": tables.pieces_table(results["pieces"]),
        "eager": tables.eager_table(results["eager"]),
    }


def fill(page: Path, filled: dict[str, str]) -> None:
    """Puts texts between the marks of a page."""
    text = page.read_text()
    for name, content in filled.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mixed", action="store_true", help="results of several commits; the page says which"
    )
    mixed = parser.parse_args().mixed
    files = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in (*NAMES, "gpu")}
    filled = texts(files, mixed)
    for name in ("results", "by-hand", "loops", "pieces", "gpu"):
        fill(DOCS / f"{name}.md", filled)
    fill(ROOT / "README.md", filled)
    resnet = plan_of(CifarResNet(56), 128)
    resnet.plot(FIGURES / "timeline.png")
    resnet.plot_frontier(FIGURES / "frontier.png")
    plan_of(UNet(), 4).plot_graph(FIGURES / "network.png")
    figures.draw_rounds(files["loops"]["results"]["rounds"], FIGURES / "rounds.png")
    figures.draw_compare(files["compare"]["results"], FIGURES / "compare.png")


if __name__ == "__main__":
    main()
