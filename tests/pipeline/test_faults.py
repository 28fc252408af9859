"""Errors in the middle: the graph is as plain `tf.gradients` leaves it; files are whole or not."""

import functools
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import Plan, get_plans, gradients, gradients_memory
from memory_saving_gradients.graph import calls, gate
from memory_saving_gradients.graph import tf_private as private
from memory_saving_gradients.pipeline import answers, plan_and_rewrite, save
from memory_saving_gradients.planning import plan_data, strategies
from memory_saving_gradients.reading import read, step_order
from memory_saving_gradients.rewriting import rewrite, waves
from memory_saving_gradients.rewriting.run import COPY
from memory_saving_gradients.runtimes import kernels
from test_models import GPT, build_v1

v1 = tf.compat.v1


class Injected(Exception):
    pass


#: Where the error comes from: the object, the name of its function, and at which call.
STEPS = {
    "the reader": (plan_and_rewrite, "read", 1),
    "the order of the step": (step_order, "planned", 1),
    "the estimate of costs": (read, "estimate_seconds", 1),
    "scratch space": (kernels, "workspace", 20),
    "loops and branches": (calls, "calls", 30),
    "the simulator": (plan_data, "simulate", 1),
    "the strategy": (strategies.STRATEGIES, "memory", 1),
    "what Grappler would do": (waves, "left_alone", 1),
    "the schedule's first entry": (rewrite._Edits, "add_run", 1),
    "the schedule's last entries": (rewrite._Edits, "add_run", 400),
    "the copies": (rewrite, "_make_copies", 1),
    "colocation": (private, "colocation", 5),
    "tags": (private, "set_unmerged", 3),
    "the first rerouted input": (private, "update_input", 1),
    "a later rerouted input": (private, "update_input", 20),
    "the order of runs": (waves.Waves, "hold", 1),
    "the first control edge": (private, "add_control_inputs", 80),
    "a later control edge": (private, "add_control_inputs", 120),
}


def network():
    return build_v1(GPT(layers=3, width=32, length=32, vocabulary=64, heads=2), 8)


def nodes(graph):
    """Name to definition; what an earlier edit made and nothing reads is left out."""
    definitions = {node.name: node for node in graph.as_graph_def().node}
    read_by_plain = {
        name.lstrip("^").split(":")[0]
        for node in definitions.values()
        if COPY not in node.name and not node.name.startswith("gate")
        for name in node.input
    }
    # Serialised, as NaN is not equal to NaN.
    return {
        name: node.SerializeToString(deterministic=True)
        for name, node in definitions.items()
        if COPY not in name or name in read_by_plain
    }


def inject(monkeypatch, where, name, call):
    real = where[name] if isinstance(where, dict) else getattr(where, name)
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise Injected(name)
        return real(*args, **kwargs)

    if isinstance(where, dict):
        monkeypatch.setitem(where, name, failing)
    else:
        monkeypatch.setattr(where, name, failing)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sweep(4)
def test_an_error_at_any_step_leaves_the_graph_plain(monkeypatch, name):
    answers.forget()
    with tf.Graph().as_default() as plain_graph:
        v1.set_random_seed(1)
        plain = network()
        tf.gradients(plain.loss, plain.variables)
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        step = network()
        with monkeypatch.context() as patch:
            inject(patch, *STEPS[name])
            with pytest.raises(Injected):
                gradients(step.loss, step.variables, checkpoints="memory")
        assert nodes(graph) == nodes(plain_graph)
        assert get_plans(graph) == []
        # It can be asked again, and both answers are right.
        ours = gradients(step.loss, step.variables, checkpoints="memory")
        expected = tf.gradients(step.loss, step.variables)
        assert get_plans(graph)[-1].recomputed
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            feed = step.feed(GPT(length=32, vocabulary=64).example(8))
            one, other = session.run([ours, expected], feed)
    for a, b in zip(tf.nest.flatten(one, True), tf.nest.flatten(other, True), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


#: What fails in a step for XLA, by device: where, the name there, which call of it.
IN_GATES = {
    "what a loop waits for": ("cpu", gate, "never", 2),
    "a loop": ("cpu", gate, "loop_node", 2),
    "a barrier": ("h100", gate, "barrier_node", 2),
    "results behind barriers": ("h100", rewrite, "note_behind", 20),
    "an input": ("h100", private, "update_input", 150),
}


@pytest.mark.parametrize("name", IN_GATES)
def test_an_error_in_a_compiled_step_leaves_it_plain(monkeypatch, name):
    def traced(differentiate):
        model = GPT(layers=4, width=32, length=32, vocabulary=64, heads=2)
        model.loss(tf.zeros((8, 33), tf.int32))  # makes the variables, so there is one trace

        @tf.function(jit_compile=True, autograph=False)
        def step(tokens):
            loss = model.loss(tokens)
            return differentiate(loss, model.variables)

        return step.get_concrete_function(tf.TensorSpec((8, 33), tf.int32)).graph

    answers.forget()
    monkeypatch.delenv(save.STRICT)
    device, *where = IN_GATES[name]
    inject(monkeypatch, *where)
    with pytest.warns(UserWarning, match=rf"Injected.*: {where[1]}"):
        left = nodes(traced(functools.partial(gradients_memory, device=device)))
    expected = nodes(traced(tf.gradients))
    made = {name for name in left if name.startswith("gate")}
    assert {name: left[name] for name in left.keys() - made} == expected


def save_and_die(path, stage):
    """Saves a plan in a process that is killed while the file is written or replaced."""
    with tf.Graph().as_default():
        step = network()
        gradients(step.loss, step.variables, checkpoints="memory")
        (plan,) = get_plans()

    def half(self, text):
        with open(self, "w") as file:
            file.write(text[: len(text) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "writing":
        Path.write_text = half
    else:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    plan.save(path)


@pytest.mark.parametrize("stage", ["writing", "replacing"])
@pytest.mark.measured
def test_a_process_that_is_killed_leaves_no_half_written_plan(graph, tmp_path, stage):
    step = network()
    gradients(step.loss, step.variables, checkpoints="memory")
    (plan,) = get_plans()
    path = tmp_path / "plan.json"
    plan.save(path)
    process = multiprocessing.get_context("spawn").Process(target=save_and_die, args=(path, stage))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert Plan.load(path) == plan
    plan.save(path)  # what the other left behind is in nobody's way
    assert Plan.load(path) == plan
