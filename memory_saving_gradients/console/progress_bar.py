"""Progress lines and bars for work that takes long, in the style of Keras."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

from memory_saving_gradients.planning.progress import heard_by

# Seconds after which progress is shown.
_LONG = 2.0
_WIDTH = 20

logger = logging.getLogger("memory_saving_gradients")


def _shows() -> bool:
    """Whether standard error is shown to a user: in a terminal or a notebook."""
    return sys.stderr.isatty() or Console(stderr=True).is_jupyter


def say(what: str) -> None:
    """Prints a line in a terminal or notebook, or else logs it at INFO."""
    if _shows():
        print(what, file=sys.stderr)
    else:
        logger.info(what)


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """Shows the progress of planning, once it has taken two seconds.

    In a terminal or notebook it is a line that is updated; elsewhere one line of the log, at INFO.

    Args:
        what: what is planned.
    """
    began = time.perf_counter()
    lines = 0

    def show(done: int, parts: int) -> None:
        nonlocal lines
        seconds = time.perf_counter() - began
        if seconds < _LONG:
            return
        if _shows():
            bar = ("━" * (_WIDTH * done // parts)).ljust(_WIDTH, "─")
            print(f"\r{what} {done}/{parts} {bar} {seconds:.0f}s", end="", file=sys.stderr)
        elif not lines:
            logger.info("%s takes longer than %.0f s ...", what, _LONG)
        lines += 1

    with heard_by(show):
        yield
    if lines and _shows():
        print(f"\r{what}: {time.perf_counter() - began:.0f}s".ljust(100), file=sys.stderr)


@contextlib.contextmanager
def bar(what: str, parts: int) -> Iterator[Callable[[], None]]:
    """A progress bar for work of `parts` parts, in a terminal or notebook; else nothing.

    Args:
        what: the text before the bar.
        parts: the number of parts.

    Yields:
        A function to call when a part is done.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not _shows()) as progress:
        task = progress.add_task(what, total=parts)
        yield lambda: progress.advance(task)
