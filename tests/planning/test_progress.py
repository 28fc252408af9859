"""Planning says how far it is, and impossible budgets are answered without a search."""

import pytest

from memory_saving_gradients.planning import search
from memory_saving_gradients.planning.bounds import least_peak
from memory_saving_gradients.planning.problem import baseline
from memory_saving_gradients.planning.progress import heard_by, reported
from memory_saving_gradients.planning.search import lowest, within
from memory_saving_gradients.planning.simulate import simulate
from tests.planning.problems import chain


def test_a_listener_hears_of_every_part():
    heard = []
    with heard_by(lambda *progress: heard.append(progress)):
        assert list(reported("abc")) == ["a", "b", "c"]
    assert list(reported("ab")) == ["a", "b"]
    assert heard == [(0, 3), (1, 3), (2, 3)]


def test_planning_is_heard():
    heard = []
    problem = chain(30)
    with heard_by(lambda *progress: heard.append(progress)):
        within(problem, simulate(problem, baseline(problem)).peak // 3)
    assert heard
    assert all(done < parts for done, parts in heard)


def test_the_lowest_peak_is_met_and_no_op_takes_more():
    problem = chain(30)
    peak = simulate(problem, lowest(problem)).peak
    assert least_peak(problem) <= peak
    assert simulate(problem, within(problem, peak)).peak <= peak
    assert simulate(problem, within(problem, peak - 1)).peak >= peak


def test_what_one_op_takes_is_not_searched_for(monkeypatch):
    problem = chain(30)
    monkeypatch.setattr(search, "Nested", pytest.fail)
    within(problem, least_peak(problem) - 1)
