"""Which tensors XLA keeps in no buffer, against what XLA:CPU makes of small steps."""

import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from memory_saving_gradients.graph import kinds, order
from memory_saving_gradients.measure import compiled_temporaries
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.reading.backward import BackwardPass
from memory_saving_gradients.reading.read import read
from memory_saving_gradients.runtimes import fusion
from tests.cases import MODELS

SIDE = 256
LEAST = SIDE * SIDE  # bytes: half of a matrix of booleans counts


def layer_norm(h):
    mean = tf.reduce_mean(h, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(h - mean), -1, keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-3)


def read_twice(function):
    def step(x, w):
        h = function(x @ w)
        return tf.reduce_sum(h * 3.0, 0), (h * h) @ w

    return step


STEPS = {
    "element-wise, between products": lambda x, w: (tf.nn.relu(x @ w) * 2.0 + 1.0) @ w,
    "a cheap function, read twice": read_twice(tf.nn.relu),
    "a dear function, read twice": read_twice(tf.tanh),
    "a dear function, read once": lambda x, w: (tf.tanh(x @ w) * 2.0) @ w,
    "softmax": lambda x, w: tf.nn.softmax(x @ w) @ w,
    "layer norm": lambda x, w: layer_norm(x @ w) @ w,
    "a concatenation": lambda x, w: (tf.concat([x @ w, x], 1) * 2.0) @ tf.concat([w, w], 0),
    "a reduction": lambda x, w: tf.reduce_sum((x @ w) * 2.0, 0),
    "a slice": lambda x, w: ((x @ w)[:, :128] * 2.0) @ w[:128],
    "a transposition": lambda x, w: (tf.transpose(tf.nn.relu(x @ w)) + 1.0) @ w,
    "padding": lambda x, w: tf.reduce_sum(tf.pad(x @ w, [[0, 8], [0, 8]]) * 2.0, 0),
    "one-hot": lambda x, w: tf.one_hot(tf.argmax(x @ w, 1), SIDE) @ w,
    "views": lambda x, w: tf.reshape(tf.reshape(x @ w, (-1,)) * 2.0, (SIDE, SIDE)) @ w,
}


@pytest.mark.parametrize("name", STEPS)
def test_what_xla_writes_to_memory(name):
    @tf.function(jit_compile=True, autograph=False)
    def step(x, w):
        return tf.nest.flatten(STEPS[name](x, w))

    inputs = [tf.ones((SIDE, SIDE))] * 2
    graph = step.get_concrete_function(*inputs).graph
    operations = [*order.dependencies(t.op for t in graph.outputs)]
    size = {
        t.name: t.dtype.size * (t.shape.num_elements() or 0)
        for op in operations
        for t in op.outputs
    }
    unbuffered = fusion.kernels(operations, graph.outputs, size, on_gpu=False).made_of
    ours = {
        op.name
        for op in operations
        for t in op.outputs
        if size[t.name] >= LEAST and op.type not in kinds.SOURCES and t.name not in unbuffered
        if kinds.shown_input(op, t.value_index) is None
    }
    compiled = step.experimental_get_compiler_ir(*inputs)
    assert ours == written(compiled(stage="optimized_hlo_proto_serialized"))


def written(program):
    """The ops whose results a compiled program writes to memory, kernel by kernel."""
    module = hlo_pb2.HloProto.FromString(program).hlo_module
    computations = {one.id: one for one in module.computations}
    names = set()
    for kernel in computations[module.entry_computation_id].instructions:
        if kernel.opcode in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast"):
            continue
        results = [kernel]
        if kernel.opcode == "fusion":
            inside = computations[kernel.called_computation_ids[0]]
            by_id = {one.id: one for one in inside.instructions}
            root = by_id[inside.root_id]
            results = [by_id[i] for i in root.operand_ids] if root.opcode == "tuple" else [root]
        for result in results:
            elements = 1
            for size in result.shape.dimensions:
                elements *= size
            if elements * 4 >= LEAST:
                names.add(result.metadata.op_name)
    return names


@pytest.mark.parametrize("name", ["chain", "gpt", "resnet20", "unet", "transformer"])
def test_the_plain_peak_is_what_xla_allocates(name):
    make, batch = MODELS[name]
    model, found = make(), []

    @tf.function(jit_compile=True, autograph=False)
    def step(*inputs):
        graph = tf.compat.v1.get_default_graph()
        loss = model.loss(*inputs)
        first_new = len(graph.get_operations())
        grads = tf.gradients(loss, model.variables)
        results = [t for t in tf.nest.flatten(grads, expand_composites=True) if t is not None]
        found.append(read(BackwardPass.since(first_new, loss, results)))
        return loss, grads

    inputs = [tf.constant(array) for array in model.example(batch)]
    compiled = compiled_temporaries(step, *inputs)
    assert plain_peak(found[0].problem) == pytest.approx(compiled, rel=0.2)
