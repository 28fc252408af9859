"""The runner of the benchmarks: fresh processes, files that say of which commit they are."""

import functools
import json
import os
import subprocess

import pytest
import tensorflow as tf

from memory_saving_gradients import gradients, gradients_memory
from scripts.benchmarks import common, run, stamp
from scripts.benchmarks.fresh import fresh
from test_models import Chain


def test_a_function_is_called_in_a_fresh_process():
    assert fresh(os.getenv, "FRESH", FRESH="yes") == "yes"
    assert fresh(os.getpid) != os.getpid()
    assert fresh(functools.partial(os.path.relpath, "a/b"), "a") == "b"


@pytest.mark.parametrize("name", [name for name in run.NAMES if name != "xla"])
def test_every_benchmark_has_rows(name):
    """All but that which needs the extra `xla-gpu`."""
    found = list(run.rows(name, None))
    assert found
    assert all(callable(section.measure) for _, section, _ in found)


def test_ways_are_measured_beside_plain(monkeypatch):
    monkeypatch.setattr(common, "ROUNDS", 2)
    differentiate = {
        "plain": tf.gradients,
        "memory": gradients_memory,
        "a hundredth": functools.partial(gradients, memory_budget=0.01),
    }
    chain = functools.partial(Chain, 12, 32)
    found = common.measure_ways(
        {
            way: functools.partial(common.in_session, chain, 512, how)
            for way, how in differentiate.items()
        }
    )
    assert found["plain"]["time_ratio"] == 1
    assert found["memory"]["peak_bytes"] < 0.6 * found["plain"]["peak_bytes"]
    low, high = found["memory"]["quartiles"]
    assert 0 < low <= found["memory"]["time_ratio"] <= high
    assert found["memory"]["overhead"] > 0
    assert "lowest peak" in found["a hundredth"]["error"]


def test_a_file_is_of_one_commit(tmp_path, monkeypatch):
    """Rows are added to those of the same commit alone."""
    calls = []
    monkeypatch.setattr(run, "fresh", lambda function, label, **environment: calls.append(label))
    arguments = ["laboratory", "--output", str(tmp_path), "--only"]
    for commit in ("a", "b"):
        monkeypatch.setattr(stamp, "commit", lambda commit=commit: commit)
        if commit == "b":
            with pytest.raises(SystemExit, match=r"laboratory\.json was taken at a, and this is b"):
                run.main([*arguments, "U-Net"])
        else:
            run.main([*arguments, "gpt"])
            run.main([*arguments, "segnet"])
    written = json.loads((tmp_path / "laboratory.json").read_text())
    assert written["commit"] == "a"
    assert (
        [*written["results"]["models"]]
        == calls
        == [
            "GPT, 6 layers, batch 8",
            "SegNet, 64 px, batch 16",
        ]
    )


def test_a_row_that_fails_is_named_at_the_end(tmp_path, monkeypatch):
    def failing(function, label, **environment):
        if label.startswith("GPT"):
            raise subprocess.CalledProcessError(1, "python")
        return {}

    monkeypatch.setattr(run, "fresh", failing)
    with pytest.raises(SystemExit, match="These failed:\nlaboratory, models: GPT, 6 layers"):
        run.main(["laboratory", "--only", "gpt", "segnet", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "laboratory.json").read_text())
    assert [*written["results"]["models"]] == ["SegNet, 64 px, batch 16"]


def test_changes_since_the_commit_are_marked(monkeypatch):
    said = {"log": "abc1234", "status": " M memory_saving_gradients/plan.py"}
    monkeypatch.setattr(stamp, "_git", lambda command, *options: said[command])
    assert stamp.commit() == "abc1234-dirty"
    said["status"] = ""
    assert stamp.commit() == "abc1234"
    said["log"] = ""  # not a clone
    assert stamp.commit() == "unknown"


def test_an_unknown_benchmark(capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["modles"])
    assert ended.value.code == 2
    assert "there is no modles, but models, laboratory" in capsys.readouterr().err
