"""The comparison with other ways to recompute: its rows say what is so."""

import functools
import json

import pytest

from scripts.benchmarks import common, compare, peers_tensorflow, run
from test_models import GPT

SMALL = functools.partial(GPT, layers=3, width=64, length=64, vocabulary=128, heads=2)


@pytest.fixture(scope="module")
def rows():
    step = functools.partial(SMALL, dropout=0.2), 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers_tensorflow.COMPARED, "small", (step, None))
        patch.setattr(peers_tensorflow.measure, "function_peak", lambda *_: 1)  # of another process
        patch.setattr(common, "ROUNDS", 1)
        found = peers_tensorflow.in_functions("small")
        found += peers_tensorflow.in_sessions(*step)
    return {row.peer: row for row in found}


@pytest.mark.slow
def test_every_way_is_measured(rows):
    assert set(rows) == {*peers_tensorflow.PEERS, *peers_tensorflow.FUNCTIONS}
    met = [row for name, row in rows.items() if "budget" not in name]  # a small model may miss it
    assert all(row.error is None and row.time_ratio > 0 for row in met)
    assert rows["ours, memory"].peak_bytes < 0.5 * rows[peers_tensorflow.PLAIN].peak_bytes


@pytest.mark.slow
def test_wrong_gradients_are_found(rows):
    """`tf.recompute_grad` draws another dropout mask when it recomputes."""
    wrong = {
        name for name, row in rows.items() if peers_tensorflow.verdict(row).startswith("wrong")
    }
    assert wrong == {"tf.recompute_grad by block", "tf.recompute_grad by block, Grappler off"}


@pytest.mark.measured
def test_one_that_fails_says_why(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("\x1b[1mno\x1b[0m\n  memory")

    plain = peers_tensorflow.PEERS[peers_tensorflow.PLAIN]
    monkeypatch.setattr(
        peers_tensorflow, "PEERS", {"tf.gradients": plain, "broken": peers_tensorflow.Peer(broken)}
    )
    _, row = peers_tensorflow.in_sessions(SMALL, 8)
    assert row.error.split() == ["no", "memory"]
    assert row.peak_bytes is None


@pytest.mark.measured
def test_the_whole_command(tmp_path, monkeypatch, capsys):
    peers = {
        name: peers_tensorflow.PEERS[name] for name in (peers_tensorflow.PLAIN, "ours, memory")
    }
    monkeypatch.setattr(peers_tensorflow, "PEERS", peers)
    monkeypatch.setattr(peers_tensorflow, "FUNCTIONS", {})
    monkeypatch.setattr(common, "ROUNDS", 1)
    monkeypatch.setattr(run, "fresh", lambda function, *arguments: function(*arguments))
    for label in list(compare.COMPARED):
        monkeypatch.delitem(compare.COMPARED, label)
    monkeypatch.setitem(compare.COMPARED, "GPT, small", ((SMALL, 8), None))
    run.main(["compare", "--only", "gpt", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert "ours, memory" in said
    written = json.loads((tmp_path / "compare.json").read_text())
    found = [row["peer"] for row in written["results"]["models"]["GPT, small"]]
    assert found == list(peers)
    with pytest.raises(SystemExit) as ended:
        run.main(["compare", "--only", "VGG"])
    assert ended.value.code == 2
