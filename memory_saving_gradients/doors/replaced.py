"""Warns at exit if TensorFlow's `gradients` was replaced, but the replacement was never called.

OpenAI's gradient-checkpointing was turned on by `tf.__dict__["gradients"] = gradients_memory`. If
the code that differentiates does not look the function up there, nothing fails and nothing is
saved.
"""

from __future__ import annotations

import atexit

from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph import tf_private

_called = False


def note_call() -> None:
    """Notes that a `gradients` of ours was called."""
    global _called
    _called = True


@atexit.register
def warn_if_never_called() -> None:
    """Warns for each TensorFlow module whose `gradients` was replaced, if none of ours ran."""
    for module, name in () if _called else tf_private.gradient_functions():
        put = vars(module).get(name)
        if name == "gradients" and not getattr(put, "__module__", "tensorflow").startswith(
            "tensorflow"
        ):
            warn(
                f"memory_saving_gradients: {module.__name__}.{name} was replaced, but the "
                "replacement was never called: TensorFlow's own gradients were computed, and no "
                'memory was saved. Use memory_saving_gradients.patch("memory") instead, which '
                "reaches optimizers and every module of TensorFlow."
            )
