"""A plan as data."""

import json

import networkx as nx
import pytest

from memory_saving_gradients.planning.simulate import simulate
from tests.report.plans import CASES, are_recomputed, plan_of


@pytest.mark.parametrize("name", CASES)
def test_json_says_what_the_plan_does(name):
    plan = plan_of(name)
    data = json.loads(plan.to_json())
    assert max(data["timeline_bytes"]) == data["peak_bytes"] == plan.peak_bytes
    assert max(data["baseline_timeline_bytes"]) == plan.baseline_peak_bytes
    assert [one["tensor"] for one in data["checkpoints"]]
    assert sum(one["overhead"] for one in data["segments"]) == pytest.approx(plan.overhead)
    assert sum(data["peak"]["by_kind"].values()) >= plan.peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_graph_of_ops(name):
    plan = plan_of(name)
    graph = plan.to_networkx()
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph) == {op.name for op in plan.problem.ops}
    runs = sum(graph.nodes[op]["runs"] for op in graph)
    assert runs == len(plan.schedule)
    kept = {op for op, facts in graph.nodes.items() if facts["kept"]}
    assert {name.rpartition(":")[0] for name in plan.checkpoints} & set(graph) == kept
    again = {op for op, facts in graph.nodes.items() if facts["runs"] > 1}
    assert again == set(plan.recomputed)


@pytest.mark.parametrize("name", CASES)
def test_the_trace_has_both_courses(name, tmp_path):
    plan = plan_of(name)
    plan.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    runs = [event for event in events if event["ph"] == "X"]
    assert len([run for run in runs if run["pid"] == 1]) == len(plan.schedule)
    assert len([run for run in runs if run["pid"] == 2]) == len(plan.problem.ops)
    ends = max(run["ts"] + run["dur"] for run in runs if run["pid"] == 1)
    assert ends == pytest.approx(simulate(plan.problem, plan.schedule).cost * 1e6)
    alive = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert max(alive) == plan.peak_bytes
    again = [run for run in runs if run["tid"] == 2]
    assert are_recomputed(plan, [run["name"] for run in again])
    assert all(run["pid"] == 1 for run in again)  # nothing of the plain step
