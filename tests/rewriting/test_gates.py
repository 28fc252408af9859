"""What holds recomputed ops back in a graph for XLA: barriers for a GPU, loops for a CPU."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

import memory_saving_gradients as msg
from memory_saving_gradients.graph import gate, kinds, order
from memory_saving_gradients.pipeline import fitting
from memory_saving_gradients.planning.stretches import parts
from memory_saving_gradients.proving import compiler
from memory_saving_gradients.rewriting.run import COPY
from memory_saving_gradients.runtimes.fusion import ELEMENT_WISE
from memory_saving_gradients.runtimes.partial_sums import PRODUCTS
from memory_saving_gradients.runtimes.xla import Xla
from test_models import GPT
from tests.doors.test_tape import USES, X, traced, weights
from tests.test_xla import assert_close, assert_same, compiled_step

__all__ = ["weights"]  # a fixture

DEVICES = {"cpu": "while", "h100": "opt-barrier"}


def program(step, inputs):
    """What is handed to XLA, as a list of (opcode, name of the op)."""
    text = step.experimental_get_compiler_ir(*inputs)(stage="hlo")
    # A tuple is a type with spaces and brackets of its own.
    return re.findall(r" ([a-z-]+)\([^)]*\).*?op_name=\"([^\"]*)\"", text)


def gates_of(step, inputs):
    ops = step.get_concrete_function(*inputs).graph.get_operations()
    return [op for op in ops if kinds.is_gate(op)]


@pytest.mark.parametrize("name", ["chain", "gpt", "unet", "resnet20"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.sweep(3)
def test_each_gate_is_one_instruction(name, device):
    step, inputs = compiled_step(name, "memory", device=device)
    gates = gates_of(step, inputs)
    assert gates
    made = program(step, inputs)
    assert {op.name for op in gates} <= {op for code, op in made if code == DEVICES[device]}
    assert sum(code == "while" for code, _ in made) == (len(gates) if device == "cpu" else 0)


@pytest.mark.parametrize("name", ["chain", "gpt"])
def test_what_runs_again_reads_nothing_past_a_barrier(name):
    """Else XLA would merge it with the original, or run it in the forward pass."""
    step, inputs = compiled_step(name, "memory", device="h100")
    ops = step.get_concrete_function(*inputs).graph.get_operations()
    copies = [op for op in ops if COPY in op.name]
    assert copies
    assert [op.name for op in copies if not any(map(kinds.is_gate, order.needed([op])))] == []
    sources = {"ReadVariableOp", "Placeholder"}
    kernels = [op for op in copies if op.type not in kinds.IN_PLACE]
    reads = [(op.name, t.op.type) for op in kernels for t in op.inputs if gate.may_wait(t)]
    assert [name for name, kind in reads if kind in sources] == []


@pytest.mark.usefixtures("deterministic")
def test_means_pass_a_barrier_as_sums_and_transposed_tensors_as_vectors():
    """Else XLA divides, and transposes, in kernels of their own before or behind it."""
    step, inputs = compiled_step("gpt", "memory", device="h100", batch_size=8)
    any_batch = [tf.TensorSpec((None, *t.shape[1:]), t.dtype) for t in inputs]
    traced = step.get_concrete_function(*any_batch)
    gates = filter(kinds.is_gate, traced.graph.get_operations())
    passing = [t for op in gates for t in op.inputs]
    types = {t.op.type for t in passing}
    assert "Sum" in types
    assert not types & {"Mean", "Transpose"}
    assert {t.shape.rank for t in passing if t.op.type == "Reshape"} == {1}
    sums = ("Sum", "XlaOptimizationBarrier")  # made there, or passing further
    assert {t.op.type for t in passing if t.shape.rank == 3} <= {*sums}
    plain, _ = compiled_step("gpt", "plain")
    assert_close(traced(*inputs), plain(*inputs), off=1e-5)


@pytest.mark.parametrize("name", ["chain", "gpt"])
def test_a_product_reads_from_memory_what_passes_a_barrier(name):
    """Else XLA fuses what makes it into the product, and keeps what it is made of as well."""
    step, inputs = compiled_step(name, "memory", device="h100")
    ops = step.get_concrete_function(*inputs).graph.get_operations()
    passing = [kinds.owner(t) for op in ops if kinds.is_gate(op) for t in op.inputs]
    fused = [t for t in passing if t.op.type in ELEMENT_WISE]
    assert [t.name for t in fused if any(r.type in PRODUCTS for r in order.readers(t))] == []


def barriers_before(op):
    """What an op is computed from behind barriers, with nothing in between but copies."""
    copies = order.leading_to([op], lambda op: [t.op for t in op.inputs if COPY in t.op.name])
    return [t for copy in copies for t in map(kinds.owner, copy.inputs) if kinds.is_gate(t.op)]


def test_what_a_stretch_reads_is_read_anew_behind_it():
    """Else XLA keeps parts of what the stretch computes from it, for the gradient."""

    @tf.function(jit_compile=True, autograph=False)
    def step(x, w):
        kept = []
        for _ in range(6):
            kept.append(x @ w)
            x = tf.nn.gelu(kept[-1])
        return msg.gradients(tf.reduce_sum(x), w, checkpoints=kept, device="h100")

    x = tf.ones((4096, 256))
    ops = step.get_concrete_function(x, x[:256]).graph.get_operations()
    copies = [op for op in ops if op.type == "Erfc" and COPY in op.name]
    made_of = {op.name: {t.name for t in barriers_before(op)} for op in copies}
    again = [f"{op.name}_1" for op in copies if f"{op.name}_1" in made_of]
    assert again
    assert all(made_of[name].isdisjoint(made_of[name[:-2]]) for name in again)


@pytest.mark.parametrize("name", ["chain", "resnet20"])
def test_the_backward_pass_reads_the_forward_pass_through_a_barrier(name):
    """Else XLA would keep what it computes from a tensor, or what it computes it from, too."""
    step, inputs = compiled_step(name, "memory", device="h100")
    graph = step.get_concrete_function(*inputs).graph
    (plan,) = msg.get_plans(graph)
    problem = plan.problem
    made = {t for op in problem.ops if not op.backward for t in op.outputs}
    kept = [graph.get_tensor_by_name(problem.tensors[t].name) for t in made]
    backward = {op.name for op in problem.ops if op.backward}
    readers = [op for t in kept if gate.may_wait(t) for op in t.consumers()]
    assert any(kinds.is_gate(op) for op in readers)
    assert [op.name for op in readers if op.name in backward] == []


@pytest.mark.parametrize("name", ["chain", "resnet20"])
def test_a_backward_op_waits_for_the_stretch_before_it(name):
    """Else XLA may run it before the stretch, where what it makes lives longer."""
    step, inputs = compiled_step(name, "memory", device="h100")
    graph = step.get_concrete_function(*inputs).graph
    (plan,) = msg.get_plans(graph)
    ops, places = plan.problem.ops, parts(plan.problem, plan.schedule)
    behind = [end for _, end in places if ops[plan.schedule[end]].backward]
    assert behind
    for end in behind:
        op = graph.get_operation_by_name(ops[plan.schedule[end]].name)
        made = ops[plan.schedule[end - 1]].name
        waited_for = {before.name for before in order.needed([op])}
        assert any(before.startswith(made + COPY) for before in waited_for), (op.name, made)


def test_max_pooling_adds_its_gradients_to_zeros_that_are_made_late():
    def compiled(how, **options):
        step, inputs = compiled_step("unet", how, **options)
        return step.get_concrete_function(*inputs).graph.get_operations(), step(*inputs)

    ops, ours = compiled("memory", device="h100")
    gradients = [op for op in ops if op.type == "MaxPoolGrad"]
    assert gradients
    for op in gradients:
        (reader,) = op.outputs[0].consumers()
        (zeros,) = (t.op for t in reader.inputs if t.op is not op)
        assert zeros.type == "BroadcastTo"
        assert tf.get_static_value(zeros.inputs[0]) is None  # XLA does not know it
    assert_close(ours, compiled("plain")[1])


def test_the_cross_entropy_of_each_example_is_written_out():
    step, inputs = compiled_step("gpt", "memory", device="h100")
    graph = step.get_concrete_function(*inputs).graph
    name = "SparseSoftmaxCrossEntropyWithLogits"
    (entropy, *_) = (op for op in graph.get_operations() if op.type == name)
    assert {op.type for op in entropy.outputs[0].consumers()} == {"XlaOptimizationBarrier"}


LABELS = np.arange(64) % 512

#: Losses of logits of 64 examples and 512 classes.
LOSSES = {
    "sparse": lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, logits),
    "dense": lambda logits: tf.nn.softmax_cross_entropy_with_logits(
        tf.one_hot(LABELS, 512, 0.9, 0.1 / 511), logits
    ),
    "of half precision": lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(
        LABELS, tf.cast(tf.cast(logits, tf.bfloat16), tf.float32)
    ),
    "of three dimensions": lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(
        LABELS.reshape(8, 8), tf.reshape(logits, (8, 8, 512))
    ),
    "of no class": lambda logits: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.where(LABELS == 3, -1, LABELS), logits
    ),
}


def head(loss, differentiate):
    @tf.function(jit_compile=True, autograph=False)
    def step(x, w, *layers):
        h = x
        for layer in layers:
            h = tf.tanh(tf.sin(h @ layer))
        total = tf.reduce_mean(loss(h @ w))
        return differentiate(total, [x, w, *layers])

    rng = np.random.default_rng(0)
    shapes = [(64, 64), (64, 512), *[(64, 64)] * 8]
    return step, [tf.constant(rng.normal(size=s, scale=0.3), tf.float32) for s in shapes]


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_logits_may_be_written_over_them(name):
    """It is computed element by element, from logits that pass no barrier.

    (Not with deterministic ops: TensorFlow then composes these losses of other ops.)
    """
    ours = functools.partial(msg.gradients, checkpoints="memory", device="h100")
    step, inputs = head(LOSSES[name], ours)
    plain, _ = head(LOSSES[name], tf.gradients)
    assert_close(step(*inputs), plain(*inputs))
    graph = step.get_concrete_function(*inputs).graph
    (plan,) = msg.get_plans(graph)
    problem = plan.problem
    (over,) = (op for op in problem.ops if op.in_place_rewritten)
    logits = max(over.inputs, key=lambda t: problem.tensors[t].bytes)
    readers = graph.get_tensor_by_name(problem.tensors[logits].name).consumers()
    assert not any(map(kinds.is_gate, readers))
    written = graph.get_operation_by_name(over.name).outputs[0]
    assert {op.type for op in written.consumers()} == {"XlaOptimizationBarrier"}
    assert readers_of_gradients(graph) == []


def readers_of_gradients(graph):
    entropies = [op for op in graph.get_operations() if op.type in kinds.CROSS_ENTROPIES]
    return [reader for op in entropies for reader in op.outputs[1].consumers()]


def test_a_gradient_that_is_not_written_over_logits_is_left_alone():
    def in_another_order(logits):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, tf.reverse(logits, [1]))

    ours = functools.partial(msg.gradients, checkpoints="memory", device="h100")
    step, inputs = head(in_another_order, ours)
    assert readers_of_gradients(step.get_concrete_function(*inputs).graph)


def test_logits_in_pieces_that_are_too_small_to_count():
    model = GPT(layers=4, width=64, length=64, vocabulary=64, heads=2)

    @tf.function(jit_compile=True, autograph=False)
    def step(tokens):
        loss = model.loss(tokens)
        return msg.gradients(loss, model.variables, checkpoints="memory", pieces=16, device="h100")

    graph = step.get_concrete_function(*map(tf.constant, model.example(8))).graph
    (plan,) = msg.get_plans(graph)
    assert any(op.in_place_rewritten and not op.outputs for op in plan.problem.ops)


def test_what_a_barrier_waits_for_is_read_behind_it():
    """Weights' gradients are done before the next stretch: who returns them waits for its gate."""
    step, inputs = compiled_step("chain", "memory", device="h100")
    graph = step.get_concrete_function(*inputs).graph
    returned = [t.op.inputs[0] for t in graph.outputs if t.op.type == "Identity"]
    late = [t for t in returned if kinds.is_gate(t.op)]
    assert len(late) > len(returned) / 2
    for tensor in late:
        before = tensor.op.inputs[tensor.value_index]
        assert tensor.shape == before.shape
        assert {reader.type for reader in before.consumers()} == {"XlaOptimizationBarrier"}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", [name for name in USES if name != "a_loop"])
@pytest.mark.sweep(3)
def test_barriers_change_no_value(weights, name):
    use, saves = USES[name]
    plain, _ = traced(use, tf.GradientTape, weights, compiled=True)
    tape = functools.partial(msg.GradientTape, device="h100")
    ours, plans = traced(use, tape, weights, compiled=True)
    assert bool(plans) == saves
    assert_close(ours, plain, off=1e-5)  # a sum of what is written out rounds in another way


@pytest.mark.usefixtures("deterministic")
def test_values_of_a_chain_are_equal_bit_for_bit():
    (step, inputs), (plain, _) = (
        compiled_step("chain", how, **options)
        for how, options in (("memory", {"device": "h100"}), ("plain", {}))
    )
    assert_same(step(*inputs), plain(*inputs))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("special", [np.nan, np.inf, -0.0, 1e-42])
def test_special_values_pass_a_barrier_unchanged(special):
    @tf.function(jit_compile=True, autograph=False)
    def through(x, y):
        return gate.passed([x], [y], barrier=True)

    x = tf.constant([special, 1.0])
    y = tf.constant([1, 2], tf.int64)
    for (passed,), given in zip(through(x, y), (x, y), strict=True):
        assert passed.numpy().tobytes() == given.numpy().tobytes()


def test_what_is_compiled_to_be_measured_is_what_runs(monkeypatch):
    """It returns what lies behind the barriers: what nobody reads there holds nothing."""
    seen = []
    as_function = compiler.as_function

    def noted(step, returned, given):
        seen.append([(t.op.type, t.value_index) for t in returned])
        return as_function(step, returned, given)

    monkeypatch.setattr(compiler, "is_installed", lambda device: True)
    monkeypatch.setattr(compiler, "temporary_bytes", lambda *args: 1)
    monkeypatch.setattr(compiler, "as_function", noted)
    monkeypatch.setattr(fitting, "_next_peak", lambda *args: None)
    step, inputs = compiled_step("chain", "memory", verify=True, device="h100")
    outputs = step.get_concrete_function(*inputs).graph.outputs
    runs = [(t.op.type, t.value_index) for t in (identity.op.inputs[0] for identity in outputs)]
    assert seen[-1] == runs
    assert "XlaOptimizationBarrier" in {kind for kind, _ in runs}


def test_the_gradient_of_a_barrier_is_handed_on():
    @tf.function(jit_compile=True, autograph=False)
    def step(x, y):
        product = x * y
        gate.hold_together(product.op)
        assert {t.op.type for t in product.op.inputs} == {"XlaOptimizationBarrier"}
        return tf.gradients(product * x, [x, y])

    x, y = tf.constant(3.0), tf.constant(5.0)
    assert [float(g) for g in step(x, y)] == [30.0, 9.0]


def test_a_part_by_hand_is_differentiated_twice(monkeypatch):
    monkeypatch.setattr(Xla, "on_gpu", True)

    @tf.function(jit_compile=True, autograph=False)
    def step(x, call):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = call(lambda x: tf.sin(tf.tanh(tf.sin(x))), x)
            norm = tf.reduce_sum(inner.gradient(y, x) ** 2)
        return outer.gradient(norm, x)

    x = tf.constant(X)
    assert_close(step(x, msg.checkpoint), step(x, lambda part, *args: part(*args)))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_part_by_hand_is_held_back_as_a_plan_is(monkeypatch, weights, on_gpu):
    def compiled(call):
        @tf.function(jit_compile=True, autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                for w in weights:
                    x = call(lambda x, w: tf.sin(tf.tanh(x @ w)), x, w)
                loss = tf.reduce_sum(x)
            return tape.gradient(loss, weights)

        return step

    monkeypatch.setattr(Xla, "on_gpu", on_gpu)
    x = tf.constant(X)
    ours = compiled(msg.checkpoint)
    made = [code for code, _ in program(ours, [x])]
    assert made.count("while") == (0 if on_gpu else len(weights))
    assert made.count("opt-barrier") >= len(weights)
    if on_gpu:
        assert made.count("opt-barrier") == len(weights)
    assert_close(ours(x), compiled(lambda part, *args: part(*args))(x))


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_step_that_is_differentiated_again_is_refused(weights, device):
    @tf.function(jit_compile=True, autograph=False)
    def slope(x):
        for w in weights:
            x = tf.tanh(tf.sin(x @ w))
        return msg.gradients(tf.reduce_sum(x), weights, checkpoints="memory", device=device)[0]

    with tf.GradientTape() as tape, pytest.raises(NotImplementedError, match="the second time"):
        tape.gradient(tf.reduce_sum(slope(tf.constant(X))), weights[0])
