"""Prints the first plan of a process, unless the user has turned that off."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("memory_saving_gradients")

_printed = False


def say_first(line: str) -> None:
    """Prints a line to standard error, if it is the first of the process.

    Args:
        line: the line. It is not printed if the logger's level is INFO or below, as the log has it
            then, nor if it is above WARNING.
    """
    first = not _printed
    no_longer()
    if first and logger.isEnabledFor(logging.WARNING) and not logger.isEnabledFor(logging.INFO):
        print(line, file=sys.stderr, flush=True)


def no_longer() -> None:
    """Turns the line off: the plans are reported in another way."""
    global _printed
    _printed = True
