"""Calls functions in processes of their own, so that what ran before changes no figure."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def fresh(function: Callable, *arguments: Any, **environment: str) -> Any:
    """What a function returns in a fresh process.

    Args:
        function: at the top level of a module, or a partial of such a one with positional
            arguments.
        *arguments: its arguments; JSON can tell them, and what the function returns.
        **environment: variables of the process beside those of this one.
    """
    if isinstance(function, functools.partial):
        return fresh(function.func, *function.args, *arguments, **environment)
    module = sys.modules[function.__module__].__spec__  # of what runs by -m, not "__main__"
    name = f"{module.name if module else function.__module__}:{function.__name__}"
    command = [sys.executable, "-m", "scripts.benchmarks.fresh", name, json.dumps(arguments)]
    settings = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | environment
    ran = subprocess.run(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    name, arguments = sys.argv[1:]
    module, function = name.split(":")
    found = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
