"""The demo as a user runs it, small."""

import json

import pytest

from scripts import resnet_demo

pytestmark = pytest.mark.measured


@pytest.mark.usefixtures("deterministic")  # which also takes back what the demo switches on
def test_demo_writes_figures_and_results(tmp_path, capsys):
    arguments = "--depths 8 14 --batch 16 --steps 2 --rounds 1 --output".split()
    resnet_demo.main([*arguments, str(tmp_path)])
    assert "Measured: one training step" in capsys.readouterr().out
    for name in ("peak_memory.png", "step_time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["depth"], row["method"]) for row in rows] == [
        (depth, method) for depth in (8, 14) for method in ("tf.gradients", "memory", "speed")
    ]
    for row in rows:
        plain = next(r for r in rows if r["depth"] == row["depth"])
        assert row["losses"] == plain["losses"]
        assert row["gradient_difference"] == 0
        # Runs of one graph differ by a few bytes; at these depths "speed" has nothing to save.
        most = 0.9 if row["method"] == "memory" else 1.01
        assert row["peak_bytes"] < plain["peak_bytes"] * most


@pytest.mark.parametrize("wrong", [["--depths", "57"], ["--batch", "0"], ["--strategy", "fast"]])
def test_demo_refuses_wrong_options(wrong, capsys):
    with pytest.raises(SystemExit):
        resnet_demo.parse(wrong)
    assert wrong[0] in capsys.readouterr().err
