"""What the compiler for a GPU that is not there says of a program."""

import json
import subprocess
import sys

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph import tf_private
from memory_saving_gradients.proving import compiler, described_gpu
from test_models import GPT
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


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in ("chain", "unet", "resnet50", "densenet") for s in ("memory", "speed")],
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


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["chain", "gpt", "unet"])
def test_no_program_for_a_gpu_has_a_loop_of_ours(name, tmp_path):
    step, inputs = compiled_step(name, "memory", device="h100")
    path = tmp_path / "step.hlo"
    program = step.experimental_get_compiler_ir(*inputs)(stage="hlo_serialized")
    path.write_bytes(tf_private.for_stablehlo(program))
    command = [sys.executable, described_gpu.__file__, "h100", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(ran.stdout)
    assert report["whiles"] == 0
    assert report["kernels"] > 0
    assert report["temporary_bytes"] > 0
