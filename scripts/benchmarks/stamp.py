"""Says of numbers when, where and of what they were taken."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from typing import Any

from scripts.benchmarks.fresh import ROOT

#: What is measured. Results of one commit of it are of one generation.
MEASURED = ("memory_saving_gradients", "test_models")


def stamp() -> dict[str, Any]:
    """What each file of results begins with."""
    packages = ("tensorflow", "keras", "numpy")
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def commit() -> str:
    """The last commit that changed what is measured, marked where the files differ from it."""
    found = _git("log", "-1", "--format=%h")
    return found + ("-dirty" if _git("status", "--porcelain") else "") if found else "unknown"


def _git(*arguments: str) -> str:
    try:
        ran = subprocess.run(
            ["git", *arguments, "--", *MEASURED], cwd=ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return ran.stdout.strip()
