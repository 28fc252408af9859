"""Loads TensorFlow without its start-up messages, if the package runs as a command.

TensorFlow writes them to standard error while it is loaded, whatever its log level. The package
loads it before `__main__` runs, so this module is imported first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: The name of the installed command.
COMMAND = "memory-saving-gradients"


def _runs_as_command() -> bool:
    words = sys.orig_argv  # for `python -m NAME`; sys.argv does not have the name yet
    named = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    program = next(iter(sys.argv), "")  # an embedded interpreter may have none
    return named == [__name__.partition(".")[0]] or Path(program).stem == COMMAND


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Captures what libraries write to standard error; shows it only if they fail."""
    with tempfile.TemporaryFile() as captured:
        terminal = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(terminal, captured.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


if _runs_as_command():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main`: no traceback during imports
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with silenced():
        import tensorflow

        tensorflow.config.list_physical_devices()  # prints messages while it looks for GPUs
