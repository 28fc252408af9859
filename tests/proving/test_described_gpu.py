"""What the compiler for a GPU that is not there says of a program."""

import json
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.proving import compiler, described_gpu
from test_models import GPT
from tests.runtimes.test_partial_sums import PARTS
from tests.test_xla import compiled_step


def test_loops_and_kernels_are_counted():
    @tf.function(jit_compile=True, autograph=False)
    def step(x, y):
        for _ in range(2):
            (x,) = tf.while_loop(lambda x: tf.reduce_sum(x) < 1e3, lambda x: (tf.exp(x @ x),), (x,))
        return x @ y, tf.sort(x)

    x = tf.ones((64, 64))
    program = step.experimental_get_compiler_ir(x, x)(stage="optimized_hlo")
    counted = described_gpu.counted(program)
    assert counted["whiles"] == 2
    assert counted["kernels"] >= 2


NEEDS_COMPILER = pytest.mark.skipif(
    not compiler.is_installed("h100"), reason="the extra xla-gpu is not installed"
)


STRATEGIES = ("memory", "speed")


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in ("chain", "gpt", "vit", "unet", "resnet50", "densenet") for s in STRATEGIES],
)
@pytest.mark.slow
def test_predictions_hold(name, strategy):
    step, inputs = compiled_step(name, strategy, device="h100")
    (plan,) = get_plans(step.get_concrete_function(*inputs).graph)
    allocated = compiler.temporary_bytes(step, inputs, "h100")
    assert plan.peak_bytes == pytest.approx(allocated, rel=0.15)


@NEEDS_COMPILER
def test_the_gradient_of_logits_is_written_over_them():
    model = GPT(layers=2, width=64, length=64, vocabulary=8192, heads=2)

    @tf.function(jit_compile=True, autograph=False)
    def step(tokens):
        loss = model.loss(tokens)
        return gradients(loss, model.variables, checkpoints="memory", device="h100")

    inputs = [tf.constant(array) for array in model.example(8)]
    logits = 8 * 64 * 8192 * tf.float32.size
    assert compiler.temporary_bytes(step, inputs, "h100") < 1.5 * logits


def compiled(step, inputs, folder):
    """What is reported of a step compiled for an H100, and the optimised program."""
    path, optimised = folder / "step.hlo", folder / "optimised.txt"
    program = step.experimental_get_compiler_ir(*inputs)(stage="hlo_serialized")
    path.write_bytes(tf_private.for_stablehlo(program))
    command = [sys.executable, described_gpu.__file__, "h100", str(path), "", str(optimised)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout), optimised.read_text()


@NEEDS_COMPILER
def test_products_are_split_as_expected(tmp_path):
    pairs = [(tf.zeros((m, k)), tf.zeros((k, n))) for m, n, k in PARTS]
    step = tf.function(lambda *pairs: [x @ y for x, y in pairs], jit_compile=True, autograph=False)
    _, program = compiled(step, pairs, tmp_path)
    for (rows, columns, _), parts in PARTS.items():
        (found,) = re.findall(rf" f32\[(\d+,)?{rows},{columns}\]\S* dot\(", program)
        assert found == ("" if parts == 1 else f"{parts},")


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["chain", "gpt", "unet"])
def test_no_program_for_a_gpu_has_a_loop_of_ours(name, tmp_path):
    step, inputs = compiled_step(name, "memory", device="h100")
    report, _ = compiled(step, inputs, tmp_path)
    assert report["whiles"] == 0
    assert report["kernels"] > 0
    assert report["temporary_bytes"] > 0
