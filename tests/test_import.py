"""`import memory_saving_gradients`, whatever else is installed."""

import subprocess
import sys

import pytest

import memory_saving_gradients

SCRIPT = """
import tensorflow.compat.v1 as tf
import memory_saving_gradients as msg

with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, (1000, 100))
    y = x
    for _ in range(20):
        y = tf.tanh(y)
    msg.gradients_memory(y, x)
    assert msg.get_plans()
    with msg.patch() as patched:
        tf.gradients(y, x)
    assert patched.plans
try:
    msg.keras
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("content", ["", "raise ImportError('no Keras')", "Variable = 3"])
@pytest.mark.sweep(3)
@pytest.mark.measured
def test_a_projects_own_package_of_the_name_keras(tmp_path, content):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text(content)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no Keras" in done.stdout if "raise" in content else "needs Keras" in done.stdout


AS_OF_OLD = """
import tensorflow.compat.v1 as tf
import memory_saving_gradients as msg

tf.__dict__["gradients"] = msg.gradients_memory
with tf.Graph().as_default():
    x = y = tf.placeholder(tf.float32, (1000, 100))
    for _ in range(20):
        y = tf.tanh(y)
    tf.gradients(y, x)
    assert msg.get_plans()
"""


@pytest.mark.measured
def test_tf_gradients_can_be_replaced_in_the_dictionary_of_its_module():
    """That of `tensorflow.compat.v1` remembers what was read of it once: we must not have."""
    done = subprocess.run([sys.executable, "-c", AS_OF_OLD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_keras_is_there_when_it_is_asked_for():
    assert callable(memory_saving_gradients.keras.save_memory)
    with pytest.raises(AttributeError, match="no attribute 'kreas'"):
        memory_saving_gradients.kreas  # noqa: B018
