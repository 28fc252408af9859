"""Compiled functions are cached, and compiled anew when what they call has changed."""

import time
from pathlib import Path

from memory_saving_gradients.planning import native
from memory_saving_gradients.planning.native import compiled


def one_more(number):
    return number + 1


def test_what_was_compiled_with_an_older_file_is_compiled_anew(monkeypatch):
    """Numba looks at the file of a function, not at those of the functions that it calls."""
    assert compiled(one_more)(1) == 2
    stored = Path(compiled(one_more).stats.cache_path)
    assert list(stored.glob("*.one_more-*.nbi"))
    monkeypatch.setattr(native, "_CHANGED", time.time() + 60)
    compiled(one_more)
    assert not list(stored.glob("*.one_more-*.nbi"))
