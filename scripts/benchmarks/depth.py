"""ResNets of growing depth, up to 1,004 layers in the memory that ResNet-56 takes plainly.

scripts/deep_resnet_memory_test at two of its depths. On 2 cores it takes about 10 minutes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import Section

#: label: the options of the demo.
SWEEPS = {
    "deep": "--depths 56 1004 --batch 32 --strategy memory budget --steps 1 --rounds 3",
}


def sweep(label: str) -> dict[str, Any]:
    """The demo's rows."""
    from scripts import resnet_demo  # which changes this process's settings

    with tempfile.TemporaryDirectory() as folder:
        resnet_demo.main([*SWEEPS[label].split(), "--output", folder])
        found = json.loads((Path(folder) / "results.json").read_text())
    return {"settings": found["settings"], "rows": found["rows"]}


SECTIONS = {"sweeps": Section(SWEEPS, sweep, {"TF_ENABLE_ONEDNN_OPTS": "0"})}
