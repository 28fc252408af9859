"""The first plan of a process is said without being asked for, as Keras says what it does."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("memory_saving_gradients")

_said = False


def say_first(line: str) -> None:
    """Prints a line to standard error, if it is the first of the process.

    Args:
        line: what to print. At INFO and below the log has it already; where the logger is set
            above WARNING, nothing is said.
    """
    first = not _said
    no_longer()
    if first and logger.isEnabledFor(logging.WARNING) and not logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr, flush=True)


def no_longer() -> None:
    """From here on no plan is the first: something else tells what is planned."""
    global _said
    _said = True
