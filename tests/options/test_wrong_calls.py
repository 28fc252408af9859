"""Wrong calls: a clear error, or what `tf.gradients` gives; the graph stays as it was."""

import re

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, gradients

v1 = tf.compat.v1
EAGER = tf.constant([1.0])


class Network:
    """A chain of tensors layer0 ... layer11 from a placeholder, in the default graph."""

    def __init__(self):
        self.graph = v1.get_default_graph()
        self.fed = v1.placeholder(tf.float32, (50, 40), "fed")
        self.x = self.fed * 1.0
        self.w = v1.get_variable("w", (40, 40), initializer=v1.ones_initializer())
        h = tf.matmul(self.x, self.w)
        for i in range(12):
            h = tf.tanh(h, name=f"layer{i}")
        self.last = h
        self.y = tf.reduce_mean(h, name="loss")
        self.after = tf.square(self.y, name="after")
        self.integers = tf.cast(self.x, tf.int32)
        self.complex = tf.complex(self.y, self.y)

    def run(self, values):
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return session.run(values, {self.fed: np.ones((50, 40))})


def elsewhere(make=lambda: tf.ones((50, 40), name="elsewhere")):
    with tf.Graph().as_default():
        return make()


def serialized(graph):
    return graph.as_graph_def().SerializeToString(deterministic=True)


def refuse(op):
    raise ZeroDivisionError("the policy's own")


def fill_collection(item):
    def fill(n):
        n.graph.add_to_collection("checkpoints", item() if callable(item) else item)
        return "collection"

    return fill


#: checkpoints (or a function from the network to them), error, message
CHECKPOINTS = {
    "unknown strategy": ("fast", ValueError, "unknown strategy"),
    "capital letters": ("Memory", ValueError, "unknown strategy"),
    "empty string": ("", ValueError, "unknown strategy"),
    "None": (None, TypeError, "got None"),
    "a number": (3, TypeError, "got 3"),
    "a share": (0.5, TypeError, r"Did you mean memory_budget=0\.5\?"),
    "a truth value": (True, TypeError, "got True"),
    "a dictionary": ({"layer3": 1}, TypeError, "got {"),
    "bytes": ([b"layer3"], TypeError, "got b'layer3'"),
    "empty list": ([], ValueError, "empty list"),
    "empty tuple": ((), ValueError, "empty list"),
    "empty iterator": (lambda n: iter(()), ValueError, "empty list"),
    "None in a list": ([None], TypeError, "got None"),
    "a number in a list": ([7], TypeError, "got 7"),
    "an array in a list": ([np.ones(3)], TypeError, "got array"),
    "a list in a list": ([["layer3"]], TypeError, "got \\['layer3'\\]"),
    "a variable": (lambda n: [n.w], TypeError, "variables are kept anyway"),
    "a tensor of another graph": (lambda n: [elsewhere()], ValueError, "another graph"),
    "an op of another graph": (lambda n: [elsewhere().op], ValueError, "another graph"),
    "a tensor after y": (lambda n: [n.after], ValueError, "not in the forward graph"),
    "a tensor beside y": (lambda n: [n.integers], ValueError, "not in the forward graph"),
    "an op after y": (lambda n: [n.after.op], ValueError, "not in the forward graph"),
    "a name that is none": (["no_such"], ValueError, "neither the name"),
    "a name after y": (["after"], ValueError, "neither the name"),
    "an output that is none": (["layer3:5"], ValueError, "neither the name"),
    "an expression for nothing": ([re.compile("nothing$")], ValueError, "neither the name"),
    "no expression": (["layer(["], ValueError, "no regular expression"),
    "two wrong ones": (["no_such", "nor_this"], ValueError, '"no_such", "nor_this": neither'),
    "a policy that raises": (refuse, ZeroDivisionError, "the policy's own"),
    "a policy of nothing": (lambda n: lambda: True, TypeError, "positional argument"),
    "an empty collection": ("collection", ValueError, "is empty"),
    "a collection of another graph": (
        fill_collection(elsewhere),
        ValueError,
        "none of them in the forward",
    ),
    "a collection of numbers": (fill_collection(5), TypeError, "got 5"),
    "a collection of names": (fill_collection("layer3"), TypeError, "got 'layer3'"),
}

#: options, error, message
OPTIONS = {
    "budget of 0": ({"memory_budget": 0}, ValueError, "not above 0"),
    "budget of 0.0": ({"memory_budget": 0.0}, ValueError, "not above 0"),
    "negative budget": ({"memory_budget": -5}, ValueError, "not above 0"),
    "negative share": ({"memory_budget": -0.5}, ValueError, "not above 0"),
    "NaN": ({"memory_budget": float("nan")}, ValueError, "memory_budget"),
    "infinity": ({"memory_budget": float("inf")}, ValueError, "memory_budget"),
    "NaN of numpy": ({"memory_budget": np.float32("nan")}, ValueError, "memory_budget"),
    "share above 1": ({"memory_budget": 1.5}, ValueError, "For bytes, give an int"),
    "no number": ({"memory_budget": "plenty"}, ValueError, "memory_budget"),
    "unknown unit": ({"memory_budget": "3 parsecs"}, ValueError, "memory_budget"),
    "negative string": ({"memory_budget": "-3MB"}, ValueError, "memory_budget"),
    "zero string": ({"memory_budget": "0MB"}, ValueError, "not above 0"),
    "batch of nothing": ({"batch_size": 0}, ValueError, "at least 1, got 0"),
    "batch as text": ({"batch_size": "32"}, TypeError, "got '32'"),
    "batch as truth value": ({"batch_size": True}, TypeError, "got True"),
    "batch of no shape": ({"batch_size": {"x": 32}}, TypeError, "whole shapes"),
    "batch of no input": ({"batch_size": {"nobody": (3, 4)}}, ValueError, '"nobody", which is no'),
    "empty budget": ({"memory_budget": ""}, ValueError, "memory_budget"),
    "True": ({"memory_budget": True}, TypeError, "memory_budget"),
    "a list of budgets": ({"memory_budget": [1000]}, TypeError, "memory_budget"),
    "a complex budget": ({"memory_budget": 1j}, TypeError, "memory_budget"),
    "a tensor": (lambda n: {"memory_budget": n.y}, TypeError, "memory_budget"),
    "impossible budget": ({"memory_budget": "1B"}, BudgetError, "Allow at least"),
    "too few bytes to be meant": ({"memory_budget": 50}, ValueError, r"did you mean 0\.5 or .50MB"),
    "impossible share": ({"memory_budget": 1e-6}, BudgetError, "Allow at least"),
    "no recomputation": ({"memory_budget": 0.5, "max_recompute": 0}, ValueError, "at least 1"),
    "half a run": ({"memory_budget": 0.5, "max_recompute": 1.5}, TypeError, "max_recompute"),
    "runs as string": ({"memory_budget": 0.5, "max_recompute": "2"}, TypeError, "max_recompute"),
    "runs as True": ({"memory_budget": 0.5, "max_recompute": True}, TypeError, "max_recompute"),
    "runs without budget": (
        {"checkpoints": "collection", "max_recompute": 2},
        ValueError,
        "give one of these",
    ),
    "overhead in percent": ({"max_overhead": 20}, ValueError, r"Did you mean 0\.2"),
    "no overhead": ({"max_overhead": 0.0}, ValueError, "max_overhead"),
    "overhead as string": ({"max_overhead": "10%"}, TypeError, "max_overhead"),
    "overhead and budget": ({"max_overhead": 0.1, "memory_budget": 0.5}, ValueError, "one of them"),
    "overhead and plan": ({"max_overhead": 0.1, "plan": "p.json"}, ValueError, "a plan decides"),
    "unknown device": ({"checkpoints": "memory", "device": "abacus"}, ValueError, "device"),
    "device as number": ({"checkpoints": "memory", "device": 3}, ValueError, "device"),
    "unknown costs": ({"checkpoints": "memory", "cost_model": "free"}, ValueError, "cost_model"),
    "plan as number": ({"plan": 7}, TypeError, "plan"),
    "plan and strategy": ({"plan": "p.json", "checkpoints": "speed"}, ValueError, "plan"),
    "no such plan": ({"plan": "/no/such/plan.json"}, FileNotFoundError, "no/such/plan"),
    "plan is a folder": ({"plan": "/"}, OSError, "directory"),
    "unknown option": ({"budget": 5}, TypeError, "budget"),
    "eager tensor as y": ({"ys": EAGER, "checkpoints": "memory"}, ValueError, "ys has an eager"),
    "eager tensor as x": ({"xs": EAGER, "checkpoints": "memory"}, ValueError, "xs has an eager"),
}

#: What is wrong for `tf.gradients` as well (or for nobody): arguments that replace y, x.
AS_PLAIN = {
    "y is None": lambda n: {"ys": None},
    "x is None": lambda n: {"xs": None},
    "no y": lambda n: {"ys": []},
    "no x": lambda n: {"xs": []},
    "y is a string": lambda n: {"ys": "loss:0"},
    "y is an array": lambda n: {"ys": np.float32(3.0)},
    "y is an op": lambda n: {"ys": n.y.op},
    "x is an op": lambda n: {"xs": n.x.op},
    "x is a name": lambda n: {"xs": "fed:0"},
    "y of another graph": lambda n: {"ys": elsewhere()},
    "x of another graph": lambda n: {"xs": elsewhere()},
    "x twice": lambda n: {"xs": [n.x, n.x]},
    "y twice": lambda n: {"ys": [n.y, n.y]},
    "x is y": lambda n: {"xs": n.y},
    "x after y": lambda n: {"xs": n.after},
    "x beside y": lambda n: {"xs": tf.ones((3,))},
    "y of integers": lambda n: {"ys": n.integers},
    "x of integers": lambda n: {"xs": n.integers},
    "y of strings": lambda n: {"ys": tf.constant("a")},
    "y of truth values": lambda n: {"ys": n.y > 0},
    "complex y": lambda n: {"ys": n.complex},
    "x in a list in a list": lambda n: {"xs": [[n.x]]},
    "x in a dictionary": lambda n: {"xs": {"x": n.x}},
    "too many grad_ys": lambda n: {"grad_ys": [n.y, n.y]},
    "grad_ys of another shape": lambda n: {"grad_ys": tf.ones((3, 3))},
    "grad_ys of another type": lambda n: {"grad_ys": tf.ones((), tf.float64)},
    "grad_ys of integers": lambda n: {"grad_ys": tf.ones((), tf.int32)},
    "grad_ys of another graph": lambda n: {"grad_ys": elsewhere(lambda: tf.ones(()))},
    "stops at y": lambda n: {"stop_gradients": n.y},
    "stops at what is elsewhere": lambda n: {"stop_gradients": elsewhere()},
    "stops at a number": lambda n: {"stop_gradients": 3},
    "unknown aggregation": lambda n: {"ys": [n.y, n.y * 2.0], "aggregation_method": 99},
    "unknown unconnected": lambda n: {"unconnected_gradients": "maybe"},
    "name of two words": lambda n: {"name": "two words"},
    "name is a number": lambda n: {"name": 5},
    "sparse x": lambda n: {"xs": tf.sparse.from_dense(n.x)},
    "ragged y": lambda n: {"ys": tf.RaggedTensor.from_row_lengths(n.last, [20, 30])},
    "no gradient": lambda n: {
        "ys": tf.reduce_sum(tf.raw_ops.Bincount(arr=n.integers, size=9, weights=n.x))
    },
}


def outcome(differentiate, case):
    """What a call gives: an error's type, or values; and the graph that it leaves."""
    with tf.Graph().as_default() as graph:
        network = Network()
        arguments = {"ys": network.y, "xs": network.x} | case(network)
        try:
            grads = differentiate(arguments.pop("ys"), arguments.pop("xs"), **arguments)
        except Exception as error:
            return type(error), serialized(graph)
        present = [grad for grad in tf.nest.flatten(grads, True) if tf.is_tensor(grad)]
        kinds = [type(grad) for grad in tf.nest.flatten(grads)]
        return kinds, [value.tobytes() for value in network.run(present)]


@pytest.mark.filterwarnings("ignore:memory_saving_gradients")
@pytest.mark.parametrize("name", AS_PLAIN)
def test_what_tf_gradients_gives(name):
    def ours(ys, xs, **arguments):
        return gradients(ys, xs, checkpoints="memory", **arguments)

    assert outcome(ours, AS_PLAIN[name]) == outcome(tf.gradients, AS_PLAIN[name])


def assert_refused(network, error, message, **options):
    arguments = {"ys": network.y, "xs": network.x, **options}
    before = serialized(network.graph)
    with pytest.raises(error, match=message):
        gradients(arguments.pop("ys"), arguments.pop("xs"), **arguments)
    if error is BudgetError:  # known only once the graph has been differentiated
        with tf.Graph().as_default() as plain:
            other = Network()
            tf.gradients(other.y, other.x)
        before = serialized(plain)
    assert serialized(network.graph) == before


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_wrong_checkpoints(graph, name):
    value, error, message = CHECKPOINTS[name]
    network = Network()
    is_made = callable(value) and value is not refuse
    checkpoints = value(network) if is_made else value
    assert_refused(network, error, message, checkpoints=checkpoints)


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_options(graph, name):
    options, error, message = OPTIONS[name]
    network = Network()
    assert_refused(network, error, message, **(options(network) if callable(options) else options))


def test_a_finalized_graph(graph):
    network = Network()
    graph.finalize()
    assert_refused(network, RuntimeError, "finalized", checkpoints="memory")


def test_outside_a_graph():
    with pytest.raises(RuntimeError, match=r"tf\.function"):
        gradients(EAGER, EAGER)


@pytest.mark.parametrize("which", ["an x", "a y"])
def test_a_checkpoint_that_is_an_end_of_the_graph(graph, which):
    network = Network()
    chosen = network.x if which == "an x" else network.y
    ours = gradients(network.y, network.x, checkpoints=[chosen, "layer5"])
    plain = tf.gradients(network.y, network.x)
    np.testing.assert_array_equal(*network.run([ours[0], plain[0]]))


def test_a_budget_above_the_baseline(graph):
    network = Network()
    (ours,) = gradients(network.y, network.x, memory_budget="1TB")
    with tf.Graph().as_default() as plain:
        other = Network()
        tf.gradients(other.y, other.x)
    assert serialized(graph) == serialized(plain)
    assert ours.shape == (50, 40)


def test_a_closed_session_and_deleted_variables(graph):
    network = Network()
    session = v1.Session()
    session.run(v1.global_variables_initializer())
    session.close()
    deleted = v1.get_variable("deleted", (40,))
    last = network.last * deleted
    del deleted
    (ours,) = gradients(tf.reduce_mean(last), network.x, checkpoints="memory")
    (plain,) = tf.gradients(tf.reduce_mean(last), network.x)
    np.testing.assert_array_equal(*network.run([ours, plain]))


def test_there_are_many_wrong_calls():
    assert len(CHECKPOINTS) + len(OPTIONS) + len(AS_PLAIN) >= 100
