"""What is planned is planned once; that the planner must be compiled is said."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.pipeline import answers
from memory_saving_gradients.planning import anneal
from memory_saving_gradients.planning.search import UNBOUNDED

PLANNING = Path(anneal.__file__).parent
#: Plans; the warning ends it, so nothing is compiled.
SCRIPT = """
import warnings
import tensorflow as tf
from memory_saving_gradients import gradients_memory
warnings.filterwarnings("error", message=".*compiled in every process")
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


@pytest.mark.measured
def test_where_nothing_can_be_stored_a_warning_names_the_variable(tmp_path):
    done = in_a_read_only_place(tmp_path, SCRIPT)
    assert (
        "UserWarning: memory_saving_gradients: the planner is compiled in every process"
        in done.stderr
    )
    assert "NUMBA_CACHE_DIR" in done.stderr.splitlines()[-1]


@pytest.mark.measured
def test_the_variable_helps(tmp_path):
    stored = "from memory_saving_gradients.planning import anneal; assert anneal.is_stored()"
    (tmp_path / "place").mkdir()
    done = in_a_read_only_place(tmp_path / "place", stored, NUMBA_CACHE_DIR=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("stored", [True, False])
def test_that_warning_comes_once(monkeypatch, stored):
    monkeypatch.setattr(anneal, "is_stored", lambda: stored)
    answers.forget()
    answers._say_if_compiling.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layers in (8, 9):
            with tf.Graph().as_default():
                x = y = tf.compat.v1.placeholder(tf.float32, (1000, 100))
                for _ in range(layers):
                    y = tf.tanh(y)
                msg.gradients(y, x, checkpoints=["Tanh_4"])
                msg.gradients_memory(y, x)
    said = [str(one.message) for one in caught if "compiled in every process" in str(one.message)]
    assert len(said) == (not stored)
    answers._say_if_compiling.cache_clear()


def test_compiling_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(anneal, "is_compiled", lambda: False)
    answers._say_if_compiling.cache_clear()
    with caplog.at_level("INFO", "memory_saving_gradients"):
        answers._say_if_compiling()
        answers._say_if_compiling()
    assert [one.getMessage() for one in caplog.records].count(COMPILING) == 1


COMPILING = "memory_saving_gradients: compiling the planner, once on this machine: about 10 seconds"


def plan_of_a_chain(**options):
    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, (1000, 100))
        for _ in range(12):
            y = tf.tanh(y)
        msg.gradients(y, x, **options)
        (plan,) = msg.get_plans(graph)
    return plan


def test_what_was_planned_is_not_planned_again(monkeypatch):
    answers.forget()
    asked = []
    real = answers._planned
    monkeypatch.setattr(answers, "_planned", lambda *args: asked.append(args) or real(*args))
    first, again = (plan_of_a_chain(checkpoints="memory") for _ in range(2))
    assert first.schedule == again.schedule
    plan_of_a_chain(checkpoints="memory", max_recompute=1)
    assert [question.most_runs for question, _ in asked] == [UNBOUNDED, 2]


IN_ANOTHER_PROCESS = """
import sys
from memory_saving_gradients.pipeline import answers
from tests.pipeline.test_answers import plan_of_a_chain
def planned(*args):
    raise AssertionError("it is planned")
answers._planned = planned
print(plan_of_a_chain(memory_budget=0.6, plan_cache=sys.argv[1]).schedule)
"""


@pytest.mark.measured
def test_another_process_takes_the_plan_from_the_folder(tmp_path):
    """Whatever the seed of its hashes: a problem and its plan do not depend on that."""
    answers.forget()
    plan = plan_of_a_chain(memory_budget=0.6, plan_cache=tmp_path / "plans")
    assert plan.recomputed
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "plans")],
        env=os.environ | {"PYTHONHASHSEED": "4", "MEMORY_SAVING_GRADIENTS_STRICT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str(plan.schedule)


def test_half_a_file_is_planned_anew_and_replaced(tmp_path):
    answers.forget()
    plan = plan_of_a_chain(memory_budget=0.6, plan_cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for part in (whole[:-8], whole[:20], b""):
        file.write_bytes(part)
        answers.forget()
        again = plan_of_a_chain(memory_budget=0.6, plan_cache=tmp_path)
        assert again.schedule == plan.schedule
        assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_named_and_the_step_is_planned(tmp_path):
    (tmp_path / "file").write_text("")
    answers.forget()
    with pytest.warns(UserWarning, match=r"not stored in plan_cache.*file"):
        assert plan_of_a_chain(memory_budget=0.6, plan_cache=tmp_path / "file").recomputed
