"""The command line as a user calls it."""

import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

from memory_saving_gradients import commands
from memory_saving_gradients.__main__ import main
from memory_saving_gradients._quiet import COMMAND

MODELS = """
import keras

def build(weights="imagenet"):
    assert weights is None
    inputs = h = keras.Input((64,))
    for i in range(12):
        h = keras.layers.Dense(256, "tanh", name=f"layer_{i}")(h)
    return keras.Model(inputs, keras.layers.Dense(4)(h))

def compiled():
    model = keras.Sequential([keras.Input((32,)), *[keras.layers.Dense(32, "tanh")] * 4])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model

def compiled_by_xla():
    model = build(weights=None)
    model.compile("adam", "mse", jit_compile=True)
    return model

class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = [keras.layers.Dense(256, "tanh") for _ in range(12)]

    def call(self, x):
        for layer in self.hidden:
            x = layer(x)
        return x

number = 3

made = compiled()

class Nested:
    build = staticmethod(build)

def warning():
    import warnings
    warnings.warn("be careful")
    return build(None)

def broken():
    return 1 / 0
"""
TARGET = "my_models:build"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_models", None)


def test_a_report_with_figures_and_data(folder, capsys):
    words = ["report", TARGET, "--batch-size", "4096", "--plot", "figures", "--json", "report.json"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "for a batch of 4096" in said
    assert "Kept for the backward pass" in said
    assert "layer_" in said
    table = said[said.index("In all, of") :].splitlines()
    rows = {row.split("  ")[1].strip(): row.split() for row in table if row.endswith("B")}
    plain, planned = (
        sum(
            float(rows[name][place]) * {"MB": 1, "kB": 1e-3}[rows[name][place + 1]]
            for name in (
                "weights",
                "optimizer, metrics",
                "inputs",
                "activations, gradients, scratch",
            )
        )
        for place in (-4, -2)
    )
    assert float(rows["in all"][-4]) == pytest.approx(plain, abs=0.3)
    assert float(rows["in all"][-2]) == pytest.approx(planned, abs=0.3)
    assert planned < plain
    data = json.loads((folder / "report.json").read_text())
    assert data["peak_bytes"] < data["baseline_peak_bytes"]
    for name in ("timeline", "frontier", "network"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 5_000
        assert (folder / "figures" / f"{name}.svg").stat().st_size > 5_000
    assert json.loads((folder / "figures" / "trace.json").read_text())["traceEvents"]
    assert "layer_11" in (folder / "figures" / "timeline.html").read_text()


@pytest.mark.measured
def test_measured_in_real_steps(folder, capsys):
    assert (
        main(["report", TARGET, "--batch-size", "8192", "--memory-budget", "0.5", "--measure"]) == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if "measured in" in line)
    plain, saving = (
        float(part.split()[-2].replace(",", ""))
        for part in line.split("MB")[:2]
        for part in [part + "MB"]
    )
    assert saving < 0.75 * plain


def test_what_xla_allocates(folder, capsys):
    words = ["report", "my_models:compiled_by_xla", "--batch-size", "1024", "--verify"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "by XLA's compiler for this machine" in text
    peaks = re.search(r"compiled peak: +([\d.]+) MB -> ([\d.]+) MB", text)
    assert re.search(f"scratch +{peaks[1]} MB +{peaks[2]} MB", text)  # in the table of all, too


def test_the_largest_batch(folder, capsys):
    assert main(["max-batch", "my_models:Nested.build", "--memory", "64MB"]) == 0
    assert "The largest batches in 0.06 GB" in capsys.readouterr().out


def test_a_saved_model(folder, capsys):
    model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(64, "tanh")] * 6])
    model.compile("adam", "mse")
    model.save("model.keras")
    assert main(["report", "model.keras", "--checkpoints", "speed"]) == 0
    assert "speed: predicted peak" in capsys.readouterr().out
    assert main(["report", "my_models:compiled"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["report", "my_models"], 1, "TARGET must be a .keras file or MODULE:CALLABLE"),
        (["report", "my_models:nothing"], 1, "has no attribute 'nothing'"),
        (["report", "no_such_module:build"], 1, "No module named 'no_such_module'"),
        (["report", "none.keras"], 1, "none.keras"),
        (["report", "my_models:number"], 1, "not a callable"),
        (["report", "my_models:Subclassed"], 1, "--input-shape"),
        (["report", "my_models:Subclassed", "--input-shape", "big"], 1, "sizes such as 32,32,3"),
        (["report", "my_models:broken"], 1, "division by zero"),
        (["report", "my_models:keras.layers.ReLU"], 1, "no Keras model"),
        (["report", TARGET, "--memory-budget", "100B"], 3, "cannot be met"),
        (["report", TARGET, "--memory-budget", "many"], 1, "memory_budget must be"),
        (
            ["report", TARGET, "--memory-budget", "1048576", "--batch-size", "1024"],
            3,
            "1.0 MB cannot be met",
        ),
        (["report", TARGET, "--verify"], 1, "XLA does not compile this model"),
        (["max-batch", TARGET, "--memory", "1GB", "--verify"], 1, "does not compile this step"),
        (["max-batch", TARGET, "--memory", "1MB"], 1, "does not hold the variables"),
        (["max-batch", TARGET, "--memory", "0.5"], 1, 'memory must be bytes, such as "11GB"'),
        (["report", "broken.keras"], 1, "broken.keras is no .keras file"),
        (["report", TARGET, "--json", "nodir/r.json"], 1, "there is no folder nodir"),
    ],
)
def test_errors_are_one_line(folder, capsys, words, code, said):
    (folder / "broken.keras").write_text("PK")
    assert main(words) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["report"],
        ["report", TARGET, "--batch-size", "0"],
        ["report", TARGET, "--fast"],
        ["max-batch", TARGET],
        ["report", TARGET, "--checkpoints", "memory", "--memory-budget", "1"],
    ],
)
def test_wrong_usage_is_2(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_debug_shows_the_traceback(folder):
    with pytest.raises(ZeroDivisionError):
        main(["report", "my_models:broken", "--debug"])


def test_a_warning_is_a_line_of_its_own(folder, capsys):
    assert main(["report", "my_models:warning"]) == 0
    assert capsys.readouterr().err == "warning: be careful\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([sys.executable, "-m", "memory_saving_gradients"], ["--help"]),
        ([str(Path(sys.executable).with_name(COMMAND))], ["max-batch", "--help"]),
    ],
)
@pytest.mark.measured
def test_help_has_examples_and_no_noise(command, words):
    ran = subprocess.run([*command, *words], capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stderr == ""
    assert "exit codes" in ran.stdout
    assert len(words) == 1 or "examples:\n  memory-saving-gradients" in ran.stdout


@pytest.mark.measured
def test_no_noise_in_a_whole_run(folder):
    command = [sys.executable, "-m", "memory_saving_gradients", "report", TARGET]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stderr == ""


def test_a_report_for_an_overhead(folder, capsys):
    assert main(["report", TARGET, "--max-overhead", "0.1", "--json", "report.json"]) == 0
    data = json.loads((folder / "report.json").read_text())
    assert data["strategy"] == "overhead"
    assert 0 < data["overhead"] <= 0.1


def test_figures_that_cannot_be_drawn_are_refused_before_any_work(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", "my_models:broken", "--plot", "figures"]) == 1
    assert "memory_saving_gradients[plot]" in capsys.readouterr().err
    assert not (folder / "figures").exists()


def test_a_model_in_the_place_of_a_callable(folder, capsys):
    assert main(["report", "my_models:made"]) == 0
    assert "Kept for the backward pass" in capsys.readouterr().out


def test_keras_on_another_backend_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    assert main(["report", TARGET]) == 1
    assert "Keras runs on jax: set KERAS_BACKEND=tensorflow" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"{COMMAND} 1.")


def test_it_runs_where_it_is_not_installed(folder, capsys, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert main(["report", TARGET]) == 0


def test_a_system_that_does_not_tell_its_memory_gets_its_report(folder, capsys, monkeypatch):
    def unknown(device):
        raise OSError

    monkeypatch.setattr(commands, "device_bytes", unknown)
    assert main(["report", TARGET]) == 0
    assert "In all\n" in capsys.readouterr().out


def test_for_a_gpu_it_speaks_of_what_keras_compiles(folder, capsys):
    assert main(["report", TARGET, "--device", "t4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "In all, compiled by XLA, of 16000.0 MB that it has" in said
    assert main(["max-batch", TARGET, "--memory", "device", "--device", "t4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "in 14.40 GB (0.00 GB of it variables), compiled by XLA" in said
    assert main(["report", TARGET, "--device", "t4", "--measure"]) == 1
    assert "--measure trains on this machine" in capsys.readouterr().err


@pytest.mark.measured
def test_who_reads_one_line_has_enough(folder):
    command = [sys.executable, "-u", "-m", "memory_saving_gradients", "report", TARGET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
        ran.stdout.readline()
        ran.stdout.close()
        assert ran.stderr.read() == b""


def test_ctrl_c_while_tensorflow_is_loaded_leaves_no_traceback():
    command = [sys.executable, "-m", "memory_saving_gradients", "--version"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
        time.sleep(1)  # TensorFlow takes some seconds to load
        ran.send_signal(signal.SIGINT)
        assert ran.stderr.read() == b""
    assert ran.returncode in (-signal.SIGINT, 130)


def test_a_model_that_does_not_tell_what_it_takes(folder, capsys):
    words = ["my_models:Subclassed", "--input-shape", "64"]
    assert main(["report", *words, "--batch-size", "512"]) == 0
    assert "for a batch of 512" in capsys.readouterr().out
    assert main(["max-batch", *words, "--memory", "64MB"]) == 0
    assert "The largest batches in" in capsys.readouterr().out
