"""Ops with state, in Python or in a resource: each runs once, and its gradient reads what it made.

A row of `PARTS` for every kind; the last test asks TensorFlow's registry whether one is missing.
"""

import contextlib
import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import ops

from memory_saving_gradients import GradientTape, checkpoint, gradients_memory
from memory_saving_gradients.graph import calls
from memory_saving_gradients.pipeline import plan_and_rewrite
from memory_saving_gradients.planning import strategies
from memory_saving_gradients.planning.keep import keeping
from tests.parts import assert_close

raw = tf.raw_ops


class State:
    """What the parts below read and write."""

    def __init__(self):
        self.calls = []
        self.count = tf.Variable(0.0, trainable=False)
        self.rows = tf.Variable(np.linspace(0.5, 1.5, 6, dtype=np.float32).reshape(3, 2))
        self.queue = tf.queue.FIFOQueue(10, [tf.float32], [(2,)])
        self.queue.enqueue_many(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        self.numbers = iter(tf.data.Dataset.range(2, 9).map(lambda i: tf.cast(i, tf.float32)))
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
        self.random = tf.random.Generator.from_seed(4)

    def cube(self, x):
        self.calls.append("cube")
        return x**3

    def counted(self, x):
        self.calls.append("counted")
        return x * np.float32(len(self.calls))


def deep(x):
    return tf.tanh(tf.sin(tf.tanh(x)))


def py_function(state, x):
    return deep(tf.ensure_shape(tf.py_function(state.cube, [deep(x)], tf.float32), (2,)))


def py_functions(state, x):
    return py_function(state, 2.0 * py_function(state, x))


def py_function_in_a_loop(state, x):
    def body(i, y):
        return i + 1, py_function(state, 3.0 * y)

    return deep(tf.while_loop(lambda i, _: i < 2, body, [0, x], parallel_iterations=1)[1])


def py_function_in_a_branch(state, x):
    return deep(tf.cond(x[0] < 9.0, lambda: py_function(state, x), lambda: x))


def numpy_function(state, x):
    made = tf.numpy_function(state.counted, [deep(x)], tf.float32)
    return deep(x) * tf.ensure_shape(made, (2,))


def stateless_numpy_function(state, x):
    made = tf.numpy_function(state.counted, [deep(x)], tf.float32, stateful=False)
    return deep(x) * tf.ensure_shape(made, (2,))


def stack(state, x):
    handle = raw.StackV2(max_size=-1, elem_type=tf.float32)
    with tf.control_dependencies([raw.StackPushV2(handle=handle, elem=deep(x))]):
        made = raw.StackPopV2(handle=handle, elem_type=tf.float32)
    return deep(x) * tf.ensure_shape(made, (2,))


def queue(state, x):
    return deep(x) * state.queue.dequeue()


def iterator(state, x):
    return deep(x) * next(state.numbers)


def table(state, x):
    key = tf.constant([1], tf.int64)
    found = state.table.lookup(key)
    y = deep(x) * found
    with tf.control_dependencies([y]):
        state.table.insert(key, found + 1.0)
    return y


def variable(state, x):
    y = deep(x) * (state.count + 1.0)
    state.count.assign_add(1.0)
    return deep(y) * state.count


def gathered(state, x):
    return deep(x) * tf.gather(state.rows, 1) * tf.gather_nd(state.rows, [[2]])[0]


def random_numbers(state, x):
    return deep(x * state.random.normal((2,)) * tf.random.shuffle(tf.constant([1.0, 2.0]), seed=1))


def random_gamma(state, x):
    """Its numbers are drawn by a seed of the trace, but do not count here."""
    return deep(x + 0.0 * tf.random.gamma([], 2.0 + deep(x)))


def checked(state, x):
    tf.debugging.assert_less(x, 9.0)
    y = tf.debugging.check_numerics(deep(x), "x")
    return deep(raw.CheckNumericsV2(tensor=raw.DebugIdentityV2(input=y), message="x"))


def branches(state, x):
    y = tf.cond(x[0] < 9.0, lambda: deep(x) * state.count.assign_add(1.0), lambda: x)
    return deep(tf.switch_case(tf.cast(y[0], tf.int32), [lambda: y * state.count, lambda: y]))


def loop(state, x):
    def body(i, y):
        return i + 1, deep(3.0 * y) + state.count.assign_add(1.0)

    return deep(tf.while_loop(lambda i, _: i < 3, body, [0, x])[1])


def dataset(state, x):
    return deep(tf.data.Dataset.range(3).reduce(tf.ones(2), lambda s, i: s + 1.0)) * deep(x)


def tensor_array(state, x):
    array = raw.TensorArrayV3(size=2, dtype=tf.float32, clear_after_read=False)
    flow = array.flow
    for i in range(2):
        flow = raw.TensorArrayWriteV3(
            handle=array.handle, index=i, value=deep(x + float(i)), flow_in=flow
        )
    last = raw.TensorArrayReadV3(handle=array.handle, index=1, flow_in=flow, dtype=tf.float32)
    both = raw.TensorArrayGatherV3(
        handle=array.handle, indices=[0, 1], flow_in=flow, dtype=tf.float32
    )
    one = raw.TensorArrayConcatV3(handle=array.handle, flow_in=flow, dtype=tf.float32).value
    return deep(tf.ensure_shape(last, (2,)) * tf.reduce_sum(both, 0) + one[2:])


def scattered_array(state, x):
    made = []
    for scatter in (True, False):
        array = raw.TensorArrayV3(size=2, dtype=tf.float32)
        given = {"handle": array.handle, "value": deep(x), "flow_in": array.flow}
        flow = (
            raw.TensorArrayScatterV3(indices=[0, 1], **given)
            if scatter
            else raw.TensorArraySplitV3(lengths=tf.constant([1, 1], tf.int64), **given)
        )
        made.append(
            raw.TensorArrayReadV3(handle=array.handle, index=1, flow_in=flow, dtype=tf.float32)
        )
    return deep(x * made[0] * tf.ensure_shape(made[1], (1,)))


def printed(state, x):
    return deep(tf.compat.v1.Print(deep(x), [tf.constant("printed")]))


PARTS = [value for value in list(globals().values()) if getattr(value, "__code__", None)]
PARTS = [part for part in PARTS if part.__code__.co_varnames[:2] == ("state", "x")]
#: TensorFlow's tape does not differentiate these, in eager mode or in a function.
GRAPHS_ALONE = [tensor_array, scattered_array]
NO_FUNCTION = [*GRAPHS_ALONE, py_function_in_a_loop]


def twice(call, which):
    """Two calls in a row, differentiated by the input of one or of both; what ran."""
    tf.random.set_seed(1)
    state = State()
    xs = [tf.constant([0.3, 0.4]), tf.constant([0.8, 0.9])]
    with warnings.catch_warnings(), tf.GradientTape(persistent=True) as tape:
        warnings.filterwarnings("ignore", "memory_saving_gradients.*py_function in a loop")
        tape.watch(xs)
        ys = [call(state, x) for x in xs]
        loss = tf.add_n([y * (i + 1.0) for i, y in enumerate(ys) if i in which])
    grads = tape.gradient(loss, [xs[i] for i in which])
    return [*ys, *grads, state.count, state.rows], state.calls


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("part", [p for p in PARTS if p not in GRAPHS_ALONE])
def test_parts_in_eager_mode(part, which):
    expected, ran = twice(part, which)
    values, ran_ours = twice(functools.partial(checkpoint, part), which)
    assert_close(values, expected)
    assert ran_ours == ran


@pytest.fixture
def all_again(monkeypatch):
    """Every op that may run twice does, whether that saves memory or not."""
    monkeypatch.setitem(strategies.STRATEGIES, "memory", lambda problem, _: keeping(problem, ()))
    monkeypatch.setattr(plan_and_rewrite, "is_worth_it", lambda *_: True)


@pytest.mark.usefixtures("all_again")
@pytest.mark.parametrize("part", [p for p in PARTS if p not in NO_FUNCTION])
def test_steps_of_a_function(part):
    def run(tape_class):
        tf.random.set_seed(1)
        state = State()

        @tf.function(autograph=False)
        def step(x):
            with tape_class() as tape:
                tape.watch(x)
                y = deep(part(state, 2.0 * deep(x)))
            return y, tape.gradient(y, x)

        found = [step(tf.constant([0.3, 0.4]))]
        return [*found, state.count, state.rows], state.calls

    values, ran = run(GradientTape)
    expected, ran_plain = run(tf.GradientTape)
    assert_close(values, expected)
    assert ran == ran_plain


@pytest.fixture
def v1_control_flow():
    """As without TensorFlow 2's behaviour: arrays are resources."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.usefixtures("all_again", "v1_control_flow")
@pytest.mark.parametrize("part", [*GRAPHS_ALONE, py_functions, stateless_numpy_function])
def test_steps_of_a_session(part):
    def run(differentiate):
        state = State()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant([0.3, 0.4])
            y = deep(part(state, 2.0 * deep(x)))
            return session.run([y, *differentiate(y, x)]), state.calls

    values, ran = run(gradients_memory)
    expected, ran_plain = run(tf.gradients)
    assert_close(values, expected)
    assert ran == ran_plain


#: These have kernels for GPUs and TPUs alone.
ELSEWHERE = {
    *("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "NcclReduce", "NcclBroadcast", "NcclAllReduce"),
    *("AllToAll", "CollectivePermute", "CrossReplicaSum"),
}


def test_every_stateful_op_has_a_row():
    known = op_def_pb2.OpList.FromString(
        pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    )
    stateful = {op.name for op in known.op if op.is_stateful}
    differentiable = {
        name for name in ops._gradient_registry.list() if ops._gradient_registry.lookup(name)
    }
    used = set()
    state = State()
    for part in PARTS:
        with tf.Graph().as_default() if part in GRAPHS_ALONE else contextlib.nullcontext():
            trace = tf.function(part, autograph=False).get_concrete_function
            graph = trace(state, tf.constant([0.3, 0.4])).graph
        used |= {op.type for op in (*graph.get_operations(), *calls.flattened(graph))}
    assert stateful & differentiable <= used | ELSEWHERE
