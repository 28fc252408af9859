"""Whether the gradients of every test model are equal to plain ones, bit for bit.

Where kernels are deterministic: with one inter-op thread, without oneDNN. On 2 cores it takes about
15 minutes.
"""

from __future__ import annotations

import numpy as np

from scripts.benchmarks.common import Section, in_session
from scripts.benchmarks.models import METHODS, MODELS


def equal(label: str) -> dict[str, bool]:
    """Whether each method's gradients are those of the first, which is plain."""
    make, batch = MODELS[label]
    values = {
        method: in_session(make, batch, differentiate, threads=1).run()
        for method, differentiate in METHODS.items()
    }
    plain = next(iter(values.values()))
    return {
        method: all(np.array_equal(a, b) for a, b in zip(ours, plain, strict=True))
        for method, ours in values.items()
    }


SECTIONS = {"models": Section(MODELS, equal, {"TF_ENABLE_ONEDNN_OPTS": "0"})}
