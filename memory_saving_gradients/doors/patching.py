"""`patch()`: makes TensorFlow's own gradient functions save memory, for a process or a `with`."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Unpack

import tensorflow as tf

from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.doors.gradients import differentiated
from memory_saving_gradients.doors.tape import GradientTape
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.options.checkpoints_argument import Checkpoints
from memory_saving_gradients.options.options import MoreOptions, Options
from memory_saving_gradients.pipeline.save import plan_updates
from memory_saving_gradients.plans.plan import Plan


class patch:
    """Makes TensorFlow's own gradients save memory.

    It replaces `tf.gradients`, `tf.compat.v1.gradients`, the functions that the `tf.compat.v1`
    optimizers call, and `tf.GradientTape`, which the training steps of Keras use. The updates that
    `minimize` or `apply_gradients` of a `tf.compat.v1` optimizer adds are planned with the step.

    A call patches the process until `undo()`. A `with` block patches the thread that runs it, and
    all threads that are started from it meanwhile. Steps that are *traced* while patched save
    memory; a `tf.function` that was traced before stays as it was. The innermost `with` block
    counts; without one, the latest call.

    Args:
        checkpoints: which forward tensors to keep, as in `gradients`.
        memory_budget: the peak to stay within, as in `gradients`.
        **more: max_overhead, max_recompute, plan, plan_cache, device, cost_model, batch_size,
            verify, running_sums and pieces, as in `gradients`.

    Attributes:
        plans: the plans that were made, newest last.

    Raises:
        TypeError: an option is of a wrong type.
        ValueError: the strategy is unknown or the budget is not positive.

    Example:
        >>> with patch("memory"):
        ...     tape = tf.GradientTape()
        >>> isinstance(tape, GradientTape)
        True
        >>> patched = patch(memory_budget="1GiB")
        >>> patched.undo()
    """

    def __init__(
        self,
        checkpoints: Checkpoints = "memory",
        memory_budget: int | str | float | None = None,
        **more: Unpack[MoreOptions],
    ) -> None:
        self._begin(Options.beside_memory(checkpoints, memory_budget, **more))

    @classmethod
    def of(cls, options: Options) -> patch:
        """A patch with existing options."""
        new = cls.__new__(cls)
        new._begin(options)
        return new

    def _begin(self, options: Options) -> None:
        self.options = options
        self.plans: list[Plan] = []
        self._asked = False  # whether gradients were asked for since it was made
        #: in a `with` block, the threads that it covers
        self._threads: weakref.WeakSet[threading.Thread] | None = None
        with _lock:
            _install()
            _patches.append(self)

    def undo(self) -> None:
        """Undoes the patch. After the last one, TensorFlow is as before the first one."""
        with _lock:
            if self in _patches:
                _patches.remove(self)
            if not _patches:
                _uninstall()

    def __enter__(self) -> patch:
        with _lock:
            if self not in _patches:
                raise RuntimeError("this patch was undone: make a new one with patch(...)")
            if self._threads is not None:
                raise RuntimeError("this patch is entered already: make a new one with patch(...)")
            self._threads = weakref.WeakSet([threading.current_thread()])
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
        if not self._asked and exception[:1] == (None,):
            warn(_NOTHING_TRACED)

    def _covers(self, thread: threading.Thread) -> bool:
        return self._threads is None or thread in self._threads


_NOTHING_TRACED = (
    "memory_saving_gradients: nothing was differentiated within this patch, so it changed nothing. "
    "It covers only what is traced within it: a tf.function, or a model's training step, that was "
    "traced before stays as it was. Patch before its first call, or create the function again."
)

_lock = threading.RLock()
_patches: list[patch] = []  # oldest first
_replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, original, replacement


def _active() -> patch | None:
    """The patch that counts for this thread."""
    with _lock:
        thread = threading.current_thread()
        covering = [p for p in _patches if p._covers(thread)]
    blocks = [p for p in covering if p._threads is not None]
    counts = blocks or covering
    return counts[-1] if counts else None


def _asked() -> patch | None:
    """The patch that counts for a call that differentiates; notes that it was used."""
    active = _active()
    if active is not None:
        active._asked = True
    return active


def _install() -> None:
    if _replaced:
        return
    for module, name in [*tf_private.gradient_functions(), (threading.Thread, "start")]:
        before = getattr(module, name)
        ours = _OURS.get(name, _patched)(before)
        _replaced.append((module, name, before, ours))
    for module, name, _, ours in _replaced:
        setattr(module, name, ours)


def _uninstall() -> None:
    for module, name, before, ours in _replaced:
        # If somebody has replaced ours, theirs stays; ours then calls the original.
        if getattr(module, name) is ours:
            setattr(module, name, before)
    _replaced.clear()


def _patched(before: Callable) -> Callable:
    """Wraps one of TensorFlow's gradient functions: ours runs instead while a patch is active."""
    signature = inspect.signature(before)

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(before)
    def patched(*args: Any, **kwargs: Any) -> Any:
        active = _asked()
        if active is None or tf.executing_eagerly():  # in eager mode TensorFlow raises its error
            return before(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return differentiated(active.options, planned=active.plans.append, **bound.arguments)

    return patched


def _applying(before: Callable) -> Callable:
    """Wraps `apply_gradients` of the `tf.compat.v1` optimizers: its updates are planned, too."""

    @functools.wraps(before)
    def apply_gradients(*args: Any, **kwargs: Any) -> Any:
        updates = before(*args, **kwargs)
        if _active() is not None and isinstance(updates, tf.Operation):
            plan_updates(updates)
        return updates

    return apply_gradients


def _starting(before: Callable) -> Callable:
    """Wraps `Thread.start`: patches that cover the calling thread cover the new one."""

    @functools.wraps(before)
    def start(self: threading.Thread) -> None:
        with _lock:
            for each in _patches:
                if each._threads is not None and each._covers(threading.current_thread()):
                    each._threads.add(self)
        before(self)

    return start


class PatchedTape(GradientTape):
    """The replacement for `tf.GradientTape` while it is patched."""

    @tf.autograph.experimental.do_not_convert
    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__(persistent, watch_accessed_variables)
        self._patch = _asked()
        self._options = self._patch.options if self._patch else None

    def _planned(self, plan: Plan) -> None:
        if self._patch:
            self._patch.plans.append(plan)


#: The replacements for functions other than those that differentiate, by name.
_OURS: dict[str, Callable[[Any], Any]] = {
    "GradientTape": lambda before: PatchedTape,
    "apply_gradients": _applying,
    "start": _starting,
}
