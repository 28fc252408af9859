"""Which tensors XLA keeps in no buffer, against what XLA:CPU makes of small steps."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph import kinds, order
from memory_saving_gradients.measure import compiled_temporaries
from memory_saving_gradients.planning.packing import allocated
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


def plan_for_gpu(function, *inputs, **options):
    @tf.function(jit_compile=True, autograph=False)
    def step(*inputs):
        total, sources = function(*inputs)
        return gradients(total, sources, device="h100", **options)

    graph = step.get_concrete_function(*inputs).graph
    (plan,) = get_plans(graph)
    return plan, {op.name: op for op in plan.problem.ops}, step(*inputs)


def test_the_mask_of_a_relu_makes_room_for_the_gradient_of_its_normalisation():
    def network(images, *filters):
        h = images
        for one in filters:
            h = tf.nn.conv2d(h, one, 1, "SAME")
            h, *_ = tf.compat.v1.nn.fused_batch_norm(h, tf.ones(16), tf.zeros(16))
            h = tf.nn.relu(h)
        return tf.reduce_sum(h), filters

    filters = [tf.ones((3, 3, 16, 16))] * 6
    plan, ops, _ = plan_for_gpu(network, tf.ones((8, 16, 16, 16)), *filters, checkpoints="memory")
    activation = 8 * 16 * 16 * 16 * tf.float32.size
    gradient = ops["gradients/FusedBatchNormV3_3_grad/FusedBatchNormGradV3"]
    (features,) = gradient.freed_first
    assert plan.problem.tensors[features].name == "Relu_3:0"
    assert gradient.workspace == activation // tf.float32.size
    assert not ops["Conv2D_3"].overwritable
    assert ops["Relu_3"].overwritable


def test_rows_are_added_to_a_dense_gradient_in_the_memory_of_the_result():
    """The embedding of a language model is often its last layer as well."""

    def network(ids, table):
        h = tf.gather(table, ids)
        for _ in range(8):
            h = tf.sin(tf.tanh(h) @ tf.ones((64, 64)))
        return tf.reduce_sum(tf.tanh(tf.matmul(h, table, transpose_b=True))), [table]

    table = tf.ones((512, 64))
    plan, ops, _ = plan_for_gpu(network, tf.range(256), table, checkpoints="memory")
    apart = [tensor for tensor in plan.problem.tensors if tensor.apart]
    assert [tensor.apart for tensor in apart] == [512 * 64 * tf.float32.size]
    (maker,) = (op for op in ops.values() if plan.problem.tensors.index(apart[0]) in op.outputs)
    assert "MatMul" in maker.name
    (result,) = plan.problem.results
    assert plan.problem.tensors[result].bytes == 0


def test_gradients_of_a_tensor_that_many_layers_read_are_added_as_they_come():
    def network(x, memory, *weights):
        h = x
        for one in weights:
            h = tf.tanh(tf.sin(h @ one) + memory @ one)
        return tf.reduce_sum(h), [x, memory, *weights]

    inputs = [tf.random.stateless_normal((128, 128), (0, i)) * 0.1 for i in range(14)]
    _, ops, ours = plan_for_gpu(network, *inputs, checkpoints="memory")
    assert any("running" in name for name in ops)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        total, _ = network(*inputs)
    for our, plain in zip(ours, tape.gradient(total, inputs), strict=True):
        np.testing.assert_allclose(our, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_budget_is_used_as_tensors_are_laid_out(share):
    make, batch = MODELS["unet"]
    model = make()

    def network(*inputs):
        return model.loss(*inputs), model.variables

    inputs = [tf.constant(array) for array in model.example(batch)]
    plain, _, _ = plan_for_gpu(network, *inputs, memory_budget=2**40)
    budget = int(share * allocated(plain.problem, plain.schedule))
    plan, _, _ = plan_for_gpu(network, *inputs, memory_budget=budget)
    assert plan.peak_bytes == allocated(plan.problem, plan.schedule)
    assert 0.9 * budget <= plan.peak_bytes <= budget
