"""This package beside other ways to recompute on TensorFlow, in a default configuration.

They are told in scripts/benchmarks/peers_tensorflow.py. On 2 cores it takes about 10 minutes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from scripts.benchmarks.common import Section
from scripts.benchmarks.peers_tensorflow import COMPARED, in_functions, in_keras, in_sessions


def measured(label: str) -> list[dict[str, Any]]:
    """All ways on one model."""
    step, keras_label = COMPARED[label]
    rows = [*in_sessions(*step), *in_functions(label), *in_keras(keras_label)]
    return [dataclasses.asdict(row) for row in rows]


SECTIONS = {"models": Section(COMPARED, measured)}
