"""Tells whoever listens how far planning has come."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Called with how many parts of a stage of planning are done, and how many there are.
Listener = Callable[[int, int], object]

_listener: contextvars.ContextVar[Listener | None]
_listener = contextvars.ContextVar("listener", default=None)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Within it, planning in this thread tells `listener` how far it is."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reported(parts: Sequence[T]) -> Iterator[T]:
    """The parts of a stage, one by one; the listener hears of each that begins."""
    listener = _listener.get()
    for done, part in enumerate(parts):
        if listener:
            listener(done, len(parts))
        yield part
