"""This package beside other ways to recompute, in a default configuration.

Those on TensorFlow are told in scripts/benchmarks/peers_tensorflow.py. JAX and PyTorch, where they
are installed, run the same network by `jax.checkpoint` and `torch.utils.checkpoint`; their peaks
are from their own reports, and their gradients are checked against their own plain ones. The
environment variable PEERS_PYTHON names an interpreter that has them, where this one has not.

On 2 cores it takes about 20 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from scripts.benchmarks import common
from scripts.benchmarks.common import Section
from scripts.benchmarks.fresh import ROOT
from scripts.benchmarks.peers_tensorflow import COMPARED, Row, in_functions, in_keras, in_sessions


def elsewhere(network: str | None, framework: str) -> list[Row]:
    """The same network on another framework; no rows where that, or the network, is not there."""
    if network is None:
        return []
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    module = f"scripts.benchmarks.peers_{framework}"
    command = [python, "-m", module, network, str(common.ROUNDS)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ran.returncode == 0:
        return [Row(**row) for row in json.loads(ran.stdout.splitlines()[-1])]
    last = ran.stderr.strip().splitlines()[-1:]
    if any("ModuleNotFoundError" in line for line in last):
        return []
    return [Row(framework, framework, error=" ".join(last))]


def measured(label: str) -> list[dict[str, Any]]:
    """All ways on one model."""
    step, keras_label, network = COMPARED[label]
    rows = [*in_sessions(*step), *in_functions(label), *in_keras(keras_label)]
    for framework in ("jax", "torch"):
        rows += elsewhere(network, framework)
    return [dataclasses.asdict(row) for row in rows]


SECTIONS = {"models": Section(COMPARED, measured)}
