"""What is said when a plan is made."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.pipeline import decide
from memory_saving_gradients.planning import runs

PLANNING = Path(runs.__file__).parent
#: Plans; the warning ends it, so nothing is compiled.
SCRIPT = """
import warnings
import tensorflow as tf
from memory_saving_gradients import gradients_memory
warnings.filterwarnings("error", message=".*compiled anew")
with tf.Graph().as_default():
    x = y = tf.compat.v1.placeholder(tf.float32, (1000, 100))
    for _ in range(8):
        y = tf.tanh(y)
    gradients_memory(y, x)
"""


def in_a_read_only_place(folder, script, **settings):
    """Runs a script by a package and a home that nothing can be written to."""
    (folder / "memory_saving_gradients" / "planning").mkdir(parents=True)
    for path in [*PLANNING.parent.iterdir(), *PLANNING.iterdir()]:
        link = folder / "memory_saving_gradients" / path.relative_to(PLANNING.parent)
        if path.name not in ("planning", "__pycache__"):
            link.symlink_to(path)
    # Even a superuser cannot write into what is no folder.
    (folder / "memory_saving_gradients" / "planning" / "__pycache__").write_text("")
    (folder / "cache").write_text("")
    home = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | home | settings,
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_where_nothing_can_be_stored_a_warning_names_the_variable(tmp_path):
    done = in_a_read_only_place(tmp_path, SCRIPT)
    assert "UserWarning: memory_saving_gradients: the planner is compiled anew" in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr.splitlines()[-1]


def test_the_variable_helps(tmp_path):
    stored = "from memory_saving_gradients.planning import runs; assert runs.is_stored()"
    (tmp_path / "place").mkdir()
    done = in_a_read_only_place(tmp_path / "place", stored, NUMBA_CACHE_DIR=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("stored", [True, False])
def test_that_warning_comes_once(monkeypatch, stored):
    monkeypatch.setattr(runs, "is_stored", lambda: stored)
    for cache in (decide._answer, decide._warn_if_not_stored):
        cache.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layers in (8, 9):
            with tf.Graph().as_default():
                x = y = tf.compat.v1.placeholder(tf.float32, (1000, 100))
                for _ in range(layers):
                    y = tf.tanh(y)
                msg.gradients(y, x, checkpoints=["Tanh_4"])
                msg.gradients_memory(y, x)
    said = [str(one.message) for one in caught if "compiled anew" in str(one.message)]
    assert len(said) == (not stored)
    decide._warn_if_not_stored.cache_clear()
