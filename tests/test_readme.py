"""The examples and commands of the README, as written."""

import os
import re
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.ops import gradients as tf_gradients

from memory_saving_gradients import get_plans

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
NEW_CODE, OLD_CODE, CHECKPOINTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_new_code_prints_a_plan_that_saves(capsys):
    names: dict = {}
    exec(NEW_CODE, names)
    assert "predicted peak" in capsys.readouterr().out
    assert len(names["grads"]) == len(names["w"])


def test_old_code_saves_through_minimize(graph, monkeypatch):
    for module in (tf, tf_gradients):
        monkeypatch.setattr(module, "gradients", module.gradients)  # to be put back
    exec(OLD_CODE, {})
    h = tf.compat.v1.placeholder(tf.float32, (256, 64))
    w = tf.Variable(tf.zeros((64, 64)))
    for _ in range(12):
        h = tf.tanh(tf.matmul(h, w))
    tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h**2))
    assert get_plans(graph)


def test_every_way_to_choose_checkpoints(graph):
    from memory_saving_gradients import gradients

    names = {"gradients": gradients, "tf": tf}
    h = tf.compat.v1.placeholder(tf.float32, (256, 64))
    names["variables"] = [tf.Variable(tf.zeros((64, 64)))]
    for i in range(6):
        h = tf.tanh(tf.matmul(h, names["variables"][0]), name=f"layer_{i}/output")
        h = tf.add(h, 1.0, name=f"block{i}/add")
    names |= {"h": h, "loss": tf.reduce_mean(h)}
    exec(CHECKPOINTS, names)
    assert [plan.strategy for plan in get_plans(graph)] == ["list", "policy"]
    assert tf.compat.v1.get_collection("checkpoints") == [h]


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\bscripts/\w+(?:\.py)?", README))))
def test_commands_are_there_and_can_be_run(command):
    assert (ROOT / command).is_file()
    assert command.endswith(".py") or os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("figure", re.findall(r"\]\((docs/[^)]+)\)", README))
def test_figures_are_there(figure):
    assert (ROOT / figure).is_file()
