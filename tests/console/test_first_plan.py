"""The first plan is said once, and by the level of the logger."""

import logging

import pytest

from memory_saving_gradients.console import first_plan


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has planned nothing."""
    monkeypatch.setattr(first_plan, "_printed", False)


def test_the_first_line_alone_is_said(fresh, capsys):
    first_plan.say_first("one")
    first_plan.say_first("two")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "one\n")


@pytest.mark.parametrize("level", ["ERROR", "CRITICAL", "INFO", "DEBUG"])
def test_the_level_of_the_logger_silences_it(fresh, capsys, caplog, level):
    with caplog.at_level(level, first_plan.logger.name):
        first_plan.say_first("one")
    assert capsys.readouterr().err == ""


def test_logging_that_is_disabled_silences_it(fresh, capsys):
    logging.disable(logging.CRITICAL)
    try:
        first_plan.say_first("one")
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


def test_something_else_may_tell_the_plan(fresh, capsys):
    first_plan.no_longer()
    first_plan.say_first("one")
    assert capsys.readouterr().err == ""
