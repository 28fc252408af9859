"""What was put into the place of `tf.gradients` and never called is named at exit."""

import subprocess
import sys

import pytest
import tensorflow as tf

from memory_saving_gradients import gradients_memory, patch
from memory_saving_gradients.doors import replaced

#: As OpenAI's file was used; `tf.gradients` was read before, so the module hands on what it knows.
SCRIPT = """
import tensorflow.compat.v1 as tf
from memory_saving_gradients import gradients_memory

tf.disable_v2_behavior()
known = tf.gradients
tf.__dict__["gradients"] = gradients_memory
x = tf.constant([1.0])
tf.gradients(x * x, x)
"""


@pytest.fixture
def never_called(monkeypatch):
    monkeypatch.setattr(replaced, "_called", False)


def test_what_nobody_called_is_named(never_called, monkeypatch):
    monkeypatch.setattr(tf, "gradients", gradients_memory)
    with pytest.warns(UserWarning, match=r"tensorflow\.gradients was replaced"):
        replaced.warn_if_never_called()


def test_what_was_called_is_not(never_called, monkeypatch, recwarn):
    monkeypatch.setattr(tf, "gradients", gradients_memory)
    with tf.Graph().as_default():
        x = tf.constant([1.0])
        tf.gradients(x * x, x)
    replaced.warn_if_never_called()
    assert not [w for w in recwarn if "replaced" in str(w.message)]


def test_a_patch_is_no_replacement(never_called, recwarn):
    with patch("memory"):
        replaced.warn_if_never_called()
    assert not [w for w in recwarn if "replaced" in str(w.message)]


@pytest.mark.measured
def test_a_script_says_so_when_it_ends():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert ran.returncode == 0
    assert "tensorflow.compat.v1.gradients was replaced" in ran.stderr
