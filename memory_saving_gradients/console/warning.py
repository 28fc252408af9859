"""Warnings that point to the user's own line."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import tensorflow as tf


def warn(text: str) -> None:
    """Warns at the user's line: the innermost one outside the package and TensorFlow."""
    inside = str(Path(__file__).parents[1]), os.path.dirname(tf.__file__)
    frame, level = sys._getframe(0), 1
    while frame.f_back and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
