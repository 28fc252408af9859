"""The progress line: on a terminal it is written over, elsewhere it is one line of the log."""

import io
import itertools
import logging

import pytest

from memory_saving_gradients.console import progress_bar
from memory_saving_gradients.planning.progress import reported


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def slow(monkeypatch):
    """Every look at the clock finds it a second later."""
    clock = itertools.count()
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: float(next(clock)))


@pytest.mark.usefixtures("slow")
def test_a_terminal_shows_a_bar_once_it_takes_long(monkeypatch):
    monkeypatch.setattr(progress_bar.sys, "stderr", terminal := Terminal())
    with progress_bar.shown("planning 5 ops"):
        list(reported(range(4)))
    lines = terminal.getvalue().split("\r")[1:]
    assert lines[:-1] == [
        "planning 5 ops 1/4 ━━━━━─────────────── 2s",
        "planning 5 ops 2/4 ━━━━━━━━━━────────── 3s",
        "planning 5 ops 3/4 ━━━━━━━━━━━━━━━───── 4s",
    ]
    assert lines[-1].strip() == "planning 5 ops: 5s"


@pytest.mark.usefixtures("slow")
def test_elsewhere_it_is_one_line_of_the_log(caplog):
    with caplog.at_level(logging.INFO), progress_bar.shown("planning 5 ops"):
        list(reported(range(6)))
    assert [record.getMessage() for record in caplog.records] == [
        "planning 5 ops takes longer than 2 s ..."
    ]


def test_what_is_quick_shows_nothing(monkeypatch, caplog):
    monkeypatch.setattr(progress_bar.sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO), progress_bar.shown("planning 5 ops"):
        list(reported(range(3)))
    assert not terminal.getvalue()
    assert not caplog.records
