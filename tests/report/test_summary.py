"""The summary, wherever it is shown."""

import io
import logging
import re

import pytest
import rich.console

from memory_saving_gradients import Plan
from memory_saving_gradients.report import facts, layers, summary
from tests.report.plans import CASES, plan_of


@pytest.mark.parametrize("name", CASES)
def test_it_fits_and_tells_all(name, capsys):
    plan = plan_of(name)
    plan.summary()
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    assert "\x1b" not in printed
    for part in facts.segments(plan):
        assert re.search(rf"\s{len(part.ops)}\s.*{part.overhead:.1%}", printed)
    total = sum(one.bytes for one in facts.kept(plan))
    assert f"Kept for the backward pass: {len(plan.checkpoints)} tensors" in printed
    assert f"{total / 1e6:,.1f} MB" in printed
    assert f"{plan.peak_bytes / 1e6:,.1f} MB" in printed
    rows, _ = layers.coarse(plan)
    assert sum(row.overhead for row in rows) == pytest.approx(plan.overhead, abs=1e-9)
    assert all(f"{row.kept / 1e6:,.1f}" in printed for row in rows if row.kept)
    soon = [one for one in facts.kept(plan) if one.why == facts.SOON]
    assert facts.SOON in printed or not soon
    shown = [one for one in facts.kept(plan) if one.bytes > 0.02 * total and one not in soon]
    assert all(f"{one.bytes / 1e6:,.1f}" in printed and one.why in printed for one in shown)


def test_the_short_form_goes_to_a_log(caplog):
    plan = plan_of("chain")
    with caplog.at_level(logging.INFO):
        plan.summary(short=True, print_fn=logging.getLogger("mine").info)
    (record,) = caplog.records
    lines = record.getMessage().splitlines()
    assert lines[0] == str(plan)
    assert len(lines) == 2
    assert facts.at_peak(plan).origin in lines[1]


def test_a_terminal_gets_colours_and_its_own_width(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(rich.console.Console, "size", rich.console.ConsoleDimensions(90, 40))
    text = summary.text(plan_of("chain"), io.StringIO())
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, plain.splitlines()[1:])) <= 90


def test_a_notebook_gets_html():
    html = plan_of("unet")._repr_html_()
    assert html.startswith("<pre")
    assert "Kept for the backward pass" in html
    assert "&gt;" in html  # what is not markup is quoted


def test_a_saved_plan_says_the_same(tmp_path, capsys):
    plan = plan_of("gpt")
    plan.save(tmp_path / "plan.json")
    plan.summary()
    said = capsys.readouterr().out
    Plan.load(tmp_path / "plan.json").summary()
    assert capsys.readouterr().out == said


def test_budget_batch_and_measurement_are_told():
    plan = plan_of("resnet20")
    assert "budget:" in summary.text(plan)
    assert "measured" not in summary.text(plan)
