"""How functions of this folder are compiled, by numba.

Compiled functions make no arrays: they get those that they write to. So numba need not count
references to arrays (`_nrt=False`), which would take a third of the time of a search.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Numba notices changes in the file of a cached function, but not in files of functions compiled
# into it.
_CHANGED = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))


_njit: Any = functools.partial(numba.njit, error_model="numpy", no_cfunc_wrapper=True, _nrt=False)


def part(function: _Function) -> _Function:
    """`function`, compiled into its callers; Python cannot call it."""
    return cast(_Function, _njit(no_cpython_wrapper=True)(function))


def inlined(function: _Function) -> _Function:
    """The same for a function with one caller, of which it becomes a part: that compiles faster."""
    return cast(_Function, _njit(inline="always")(function))


def compiled(function: _Function) -> _Function:
    """`function`, compiled at its first call; once per machine where the result can be cached.

    It may call other compiled functions of this folder.
    """
    try:
        dispatcher = _njit(cache=True)(function)
    except RuntimeError:  # no folder to store it in
        return cast(_Function, _njit()(function))
    for index in Path(str(dispatcher.stats.cache_path)).glob(f"*.{function.__name__}-*.nbi"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if index.stat().st_mtime < _CHANGED:
                index.unlink()
    return cast(_Function, dispatcher)


def is_compiled_here(function: Any) -> bool:
    """Whether `function`, which is `compiled`, is cached on this machine."""
    return any(Path(function.stats.cache_path).glob(f"*.{function.__name__}-*.nbi"))


def is_stored_here(function: Any) -> bool:
    """Whether `function`, which is `compiled`, is cached for the next process."""
    return function.stats.cache_path is not None
