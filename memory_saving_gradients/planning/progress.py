"""Reports the progress of planning to a listener."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Called with the number of parts of a planning stage that are done, and the number of all parts.
Listener = Callable[[int, int], object]

_listener: contextvars.ContextVar[Listener | None]
_listener = contextvars.ContextVar("listener", default=None)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Within it, planning in this thread reports its progress to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reported(parts: Sequence[T]) -> Iterator[T]:
    """Yields the parts of a stage, and reports each to the listener as it begins."""
    listener = _listener.get()
    for done, part in enumerate(parts):
        if listener:
            listener(done, len(parts))
        yield part
