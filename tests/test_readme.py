"""The examples and commands of the README, as written."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.ops import gradients as tf_gradients

from memory_saving_gradients import get_plans

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
KERAS, TAPE, PATCH, NEW_CODE, OLD_CODE, CHECKPOINTS, BUDGET, PLAN, SIZES = re.findall(
    r"```python\n(.*?)```", README, re.DOTALL
)


def test_keras_saves_and_reports_and_so_does_the_patch(capsys):
    names = {}
    exec(KERAS, names)
    printed = capsys.readouterr().out
    assert "predicted peak" in printed
    assert "measured peak" in printed
    exec(PATCH, names)
    assert names["patched"].plans
    assert "predicted peak" in capsys.readouterr().out


#: What the README's examples stand for.
GIVEN = """
import tensorflow as tf
from memory_saving_gradients import get_plans, gradients
tf.compat.v1.disable_eager_execution()
graph = tf.compat.v1.get_default_graph()
h = tf.compat.v1.placeholder(tf.float32, (2**17, 512))
weight = tf.Variable(tf.zeros((512, 512)))
for i in range(12):
    h = tf.tanh(tf.matmul(h, weight), name=f"layer_{i}/output")
    h = tf.add(h, 0.0, name=f"block{i}/add")
loss, variables = tf.reduce_mean(h), [weight]
"""
UNKNOWN_SIZES = """
tf.compat.v1.reset_default_graph()
graph = tf.compat.v1.get_default_graph()
tokens = tf.compat.v1.placeholder(tf.int32, (None, None), "tokens")
table = tf.Variable(tf.zeros((64, 32)))
h = tf.nn.embedding_lookup(table, tokens)
for i in range(12):
    h = tf.tanh(tf.sin(h))
loss, variables = tf.reduce_mean(h), [table]
"""
EXAMPLES = {
    "Keras and the patch": KERAS + PATCH,
    "tape": TAPE,
    "new code": NEW_CODE,
    "old code": OLD_CODE,
    "checkpoints": GIVEN + CHECKPOINTS,
    "budget and plan": GIVEN + BUDGET + PLAN,
    "batch sizes": GIVEN + UNKNOWN_SIZES + SIZES,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_need_nothing_but_the_package(name, tmp_path):
    run_example(name, tmp_path, [sys.executable, str(ROOT / "tests" / "bare.py")])


def run_example(name, folder, command):
    script = folder / "example.py"
    script.write_text(EXAMPLES[name])
    settings = {k: v for k, v in os.environ.items() if k != "TF_ENABLE_ONEDNN_OPTS"}
    ran = subprocess.run(
        [*command, str(script)], env=settings, cwd=folder, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "UserWarning" not in ran.stderr


@pytest.mark.slow
def test_examples_run_in_a_fresh_environment(tmp_path):
    """In a real one, made by pip."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
    for name in EXAMPLES:
        run_example(name, tmp_path, [python])


def test_the_tape_saves(tmp_path):
    script = tmp_path / "tape.py"
    script.write_text(TAPE)
    step = runpy.run_path(str(script))["step"]
    assert get_plans(step.get_concrete_function(tf.zeros((2048, 256))).graph)


def test_new_code_prints_a_plan_that_saves(capsys, tmp_path):
    script = tmp_path / "new_code.py"
    script.write_text(NEW_CODE)  # a file, as AutoGraph converts only what has a source
    names = runpy.run_path(str(script))
    assert "predicted peak" in capsys.readouterr().out
    assert len(names["grads"]) == len(names["w"])


def test_old_code_saves_through_minimize(graph, monkeypatch):
    for module in (tf.compat.v1, tf_gradients):
        monkeypatch.setattr(module, "gradients", module.gradients)  # to be put back
    exec(OLD_CODE, {})
    h = tf.compat.v1.placeholder(tf.float32, (256, 64))
    w = tf.Variable(tf.zeros((64, 64)))
    for _ in range(12):
        h = tf.tanh(tf.matmul(h, w))
    tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h**2))
    tf.compat.v1.gradients(tf.reduce_mean(h), w)
    assert len(get_plans(graph)) == 2


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


def test_a_budget_is_planned_explained_saved_and_applied_again(tmp_path, monkeypatch, capsys):
    from memory_saving_gradients import gradients

    monkeypatch.chdir(tmp_path)

    def names():
        h = tf.compat.v1.placeholder(tf.float32, (2**17, 512))
        weight = tf.Variable(tf.zeros((512, 512)))
        for _ in range(12):
            h = tf.tanh(tf.matmul(h, weight))
        graph = tf.compat.v1.get_default_graph()
        loss = tf.reduce_mean(h)
        everything = {"loss": loss, "variables": [weight], "graph": graph}
        return everything | {"gradients": gradients, "get_plans": get_plans}

    with tf.Graph().as_default():
        given = names()
        exec(BUDGET + PLAN, given)
        overhead, bound, gap = map(float, capsys.readouterr().out.split())
        assert 0 < bound <= overhead * (1 + 1e-9)
        assert gap == pytest.approx(overhead - bound, abs=1e-9)
    with tf.Graph().as_default() as again:
        exec('gradients(loss, variables, plan="plan.json")', names())
        assert get_plans(again)[-1].schedule == given["plan"].schedule


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\bscripts/\w+(?:\.py)?", README))))
def test_commands_are_there_and_can_be_run(command):
    assert (ROOT / command).is_file()
    assert command.endswith(".py") or os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("figure", re.findall(r"\]\((docs/[^)]+)\)", README))
def test_figures_are_there(figure):
    assert (ROOT / figure).is_file()
