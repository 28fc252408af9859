"""The runner of the benchmarks: fresh processes, files that say of which commit they are."""

import dataclasses
import functools
import json
import os
import subprocess

import pytest
import tensorflow as tf

from memory_saving_gradients import gradients, gradients_memory
from memory_saving_gradients.graph import devices
from scripts.benchmarks import common, gpu, notes, roofline, run, stamp, tables
from scripts.benchmarks.fresh import fresh
from scripts.benchmarks.peers_tensorflow import Row
from scripts.benchmarks.render import fill
from test_models import Chain


def test_a_function_is_called_in_a_fresh_process():
    assert fresh(os.getenv, "FRESH", FRESH="yes") == "yes"
    assert fresh(os.getpid) != os.getpid()
    assert fresh(functools.partial(os.path.relpath, "a/b"), "a") == "b"


@pytest.mark.parametrize("name", run.NAMES)
def test_every_benchmark_has_rows(name):
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
    arguments = ["planning", "--output", str(tmp_path), "--only"]
    for commit in ("a", "b"):
        monkeypatch.setattr(stamp, "commit", lambda commit=commit: commit)
        if commit == "b":
            with pytest.raises(SystemExit, match=r"planning\.json was taken at a, and this is b"):
                run.main([*arguments, "U-Net"])
        else:
            run.main([*arguments, "gpt"])
            run.main([*arguments, "segnet"])
    written = json.loads((tmp_path / "planning.json").read_text())
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
    with pytest.raises(SystemExit, match="These failed:\nplanning, models: GPT, 6 layers"):
        run.main(["planning", "--only", "gpt", "segnet", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "planning.json").read_text())
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
    assert "there is no modles, but models, keras_fit" in capsys.readouterr().err


def test_generations_are_not_mixed():
    one = {"models": {"commit": "a"}, "xla": {"commit": "a"}}
    assert notes.taken(one, mixed=False) == "All of it is of commit a."
    two = one | {"eager": {"commit": "b"}}
    with pytest.raises(SystemExit, match=r"a: models.json, xla.json; b: eager.json.* --mixed"):
        notes.taken(two, mixed=False)
    assert "(a: models.json, xla.json; b: eager.json)" in notes.taken(two, mixed=True)


def test_the_results_say_of_which_commit_they_are():
    for name in run.NAMES:
        assert json.loads((run.HERE / f"{name}.json").read_text())["commit"]


def test_a_table():
    columns = [
        tables.Column("name", lambda row: row[0]),
        tables.Column("share", lambda row: row[1], "{:.0%}"),
    ]
    assert tables.table([("a", 0.5), ("b", None)], columns).splitlines() == [
        "| name | share |",
        "| --- | ---: |",
        "| a | 50% |",
        "| b |  |",
    ]
    words = tables.Column("way", lambda row: row[0], words=True)
    assert tables.table([], [*columns, words]).splitlines()[1] == "| --- | ---: | --- |"


def test_the_best_other_way_has_right_gradients_and_its_own_plain():
    function = "tf.gradients in a tf.function"
    rows = [
        Row("tf.gradients", "tf.gradients", 100, 1.0, 0.0),
        Row(function, function, 100, 1.0, 0.0),
        Row("Keras fit", "Keras fit", 400, 1.0, 0.0),
        Row("ours, memory", "tf.gradients", 10, 1.2, 0.0),
        Row("ours, budget 0.3", "tf.gradients", 30, 1.1, 0.0),
        Row("√n articulation points", "tf.gradients", 20, 1.3, 0.0),
        Row("wrong", function, 5, 1.2, 0.5),
        Row("slow", function, 5, 20.0, 0.0),
        Row("broken", function, error="no"),
        Row("lowest", function, 50, 1.2, 0.0),
        Row("in Keras", "Keras fit", 100, 1.25, 0.0),
    ]
    ways = [dataclasses.asdict(row) for row in rows]
    *_, line = tables.compare_table({"models": {"net": ways}}).splitlines()
    ours = "| net | 0 MB | 10.0× at 1.20× | 3.3× at 1.10× | 5.0× at 1.30× |"
    assert line == f"{ours} in Keras: 4.0× at 1.25× |"


def test_a_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->old<!-- /a -->\nafter\n")
    for _ in range(2):
        fill(page, {"a": "new", "b": "elsewhere"})
        assert page.read_text() == "before\n<!-- a -->\n\nnew\n\n<!-- /a -->\nafter\n"


def test_misses_of_the_hard_graphs_are_named():
    def found(measured):
        return {"budget": 1000, "predicted": 990, "measured": measured}

    settings = {
        "oneDNN 1": {"GAN": {"0.7": found(1015), "lowest": found(1500)}, "LSTM": {"0.5": None}},
        "oneDNN 0": {"GAN": {"0.7": {"lowest": 900}}, "LSTM": {"0.5": found(700)}},
    }
    said = notes.corpus(settings)
    assert "Of the 3 budgets that can be met on 2 graphs, 2 are kept to 1.02" in said
    assert "0.700 (LSTM) to 1.500 (GAN)" in said
    assert said.endswith("in brackets: GAN 1.500 (the lowest).")


@pytest.mark.slow
def test_the_benchmark_for_gpus_runs_without_one(tmp_path, capsys):
    gpu.main(["--output", str(tmp_path / "gpu.json"), "--seconds", "3600"])
    assert "there is no GPU" in capsys.readouterr().out
    found = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert [*found.pop("unequal gradients")] == [*gpu.SMALL]
    assert len(found) == 2 * len(gpu.SMALL) + len(gpu.SMALL_FIT)
    for ways in found.values():
        assert [*ways] == [*gpu.WAYS]
        assert ways["memory"]["peak_bytes"] > 0
        assert ways["memory"]["time_ratio"] > 0


def test_what_a_gpu_did():
    def found(size, **more):
        sizes = {"peak_bytes": size, "predicted_bytes": 0.9 * size}
        return sizes | {"time_ratio": 1.2, "seconds": 1.5} | more

    ways = {"plain": found(1e9), "memory": found(2e8), "speed": found(5e8)}
    ways["budget 0.5"] = found(4.9e8, budget_bytes=5e8)
    too_large = {"plain": {"error": "out of memory"}, "memory": found(6e9)}
    results = {"net, XLA": ways, "net, without XLA": ways, "net, times 24": too_large}
    results["unequal gradients"] = {"net": {"plain": 0, "memory": 0}}
    results["JAX, net"] = {"JAX": found(1.1e9), "jax.checkpoint by block": found(4e8, seconds=1.8)}
    *_, one, two = tables.gpu_table(results).splitlines()
    cells = "1,000 MB | 200 MB (5.0×) at 1.20× | 500 MB (2.0×) at 1.20× | 0.98 at 1.20× |"
    assert one == f"| net, XLA | {cells} 180 / 200 (-10.0%) |"
    assert two.startswith("| net, without XLA |")
    said = notes.gpu(
        {"device": "card", "commit": "abc", "versions": {"tensorflow": "2"}, "results": results}
    )
    assert (
        "net, times 24, without XLA: out of memory plainly, 6,000 MB and 1.50 s a step with "
        "`memory`."
    ) in said
    assert said.endswith(
        "net, without XLA, deterministic: gradients that differ in a bit: 0 with `memory`."
    )
    _, _, *ours, _, theirs = tables.gpu_beside_jax(results).splitlines()
    assert ours[1] == "| net | ours, memory | 200 | 0.20 | 1500.0 | 1.00× |"
    assert theirs == "| net | jax.checkpoint by block | 400 | 0.36 | 1800.0 | 1.20× |"


@pytest.mark.parametrize(
    ("step", "side", "expected"),
    [
        # An H100's tensor cores do 132 × 512 multiplications of float32 a cycle, at 1.83 GHz.
        (lambda x: x @ x, 2048, 2048**3 / (132 * 512 * 1.83e9)),
        (lambda x: tf.nn.relu(x + 1.0) * 2.0, 2048, 2 * 4 * 2048**2 / 3.35e12),
        (lambda x: tf.sin(x), 8, 2e-6),
    ],
    ids=["multiplies", "moves bytes", "is launched"],
)
def test_a_kernel_takes_what_the_roofline_says(step, side, expected):
    x = tf.ones((side, side))
    compiled = tf.function(step, jit_compile=True).experimental_get_compiler_ir(x)
    found = roofline.estimate(compiled(stage="optimized_hlo"), "h100")
    assert found.seconds == pytest.approx(expected, rel=0.3)


CONVOLUTION = """HloModule step

ENTRY %main (x: bf16[8,32,32,64], w: bf16[128,3,3,64]) -> bf16[8,32,32,128] {
  %x = bf16[8,32,32,64]{3,2,1,0} parameter(0)
  %w = bf16[128,3,3,64]{3,2,1,0} parameter(1)
  %conv = (bf16[8,32,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), dim_labels=b01f_o01i->b01f
}
"""


def test_a_convolution_of_half_precision_takes_half_as_long(monkeypatch):
    monkeypatch.setattr(roofline, "_LAUNCH", 0.0)
    monkeypatch.setitem(devices.DEVICES["h100"], "bandwidth", 1e30)
    found = roofline.estimate(CONVOLUTION, "h100")
    assert found.multiplications == 8 * 32 * 32 * 128 * 3 * 3 * 64 / 2
    assert found.seconds == pytest.approx(found.multiplications / (132 * 512 * 1.83e9))
