"""What XLA's compilers allocate for the test models, for an H100 that need not be there and a CPU.

Needs the extra `xla-gpu`. Bytes are those of temporaries, by the compilers' own reports; nothing
runs. Beside our plans stand what else recomputes: `tf.recompute_grad` around the network's blocks,
XLA's own rematerialisation (the program of the plain step on a GPU with too little memory), and
`jax.checkpoint` around the same blocks written in JAX. Keras's `RematScope` raises in a compiled
`fit`, so it has no row. Floating point operations are XLA's count of the programs handed over,
for plans that no compile was asked of: those that were tried and given up stay in a program as dead
code.

On 2 cores it takes about an hour.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.graph import gate, kinds, tf_private
from memory_saving_gradients.measure import compiled_temporaries
from memory_saving_gradients.proving import described_gpu
from scripts.benchmarks import roofline
from scripts.benchmarks.common import Section, planned, timed
from scripts.benchmarks.fresh import ROOT
from scripts.benchmarks.models import MODELS
from test_models import VGG16, Model, ResNet50, Transformer, ViT

GPU = "h100"


class KerasResNet50(Model):
    """Keras's own ResNet-50 under a policy of precision."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        keras.config.set_dtype_policy(policy)
        self._network = keras.applications.ResNet50(weights=None, classifier_activation=None)
        self.variables += [variable.value for variable in self._network.trainable_variables]

    def loss(self, *inputs: tf.Tensor) -> tf.Tensor:
        images, labels = inputs
        logits = tf.cast(self._network(images, training=True), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(losses)

    def example(self, batch: int) -> list[np.ndarray]:
        return [np.zeros((batch, 224, 224, 3), np.float32), np.zeros(batch, np.int32)]


#: label: (builder, batch), and the same network in peers_jax.
COMPILED: dict[str, tuple[tuple[Callable[[], Model], int], str | None]] = {
    "chain, 64 layers, 2048 × 256": (MODELS["chain, 64 layers, 2048 × 256"], None),
    "GPT, 6 layers, batch 8": (MODELS["GPT, 6 layers, batch 8"], "gpt"),
    "Transformer, 4 + 4 layers, batch 32": (MODELS["Transformer, 4 + 4 layers, batch 32"], None),
    "Transformer, 6 + 6 layers, 512 wide, 32,128 words, batch 8": (
        (functools.partial(Transformer, 6, 512, 512, 32_128, 8), 8),
        None,
    ),
    "ResNet-50, 224 px, batch 64": ((functools.partial(ResNet50, 224), 64), "resnet50"),
    "ResNet-56, CIFAR, batch 128": (MODELS["ResNet-56, CIFAR, batch 128"], None),
    "U-Net, 128 px, batch 4": (MODELS["U-Net, 128 px, batch 4"], None),
    "DenseNet, 2 × 12 layers, batch 64": (MODELS["DenseNet, 2 × 12 layers, batch 64"], None),
    "VGG16, 224 px, batch 32": ((VGG16, 32), None),
    "ViT-B/16, 224 px, batch 64": ((ViT, 64), None),
    "Keras ResNet-50, mixed_bfloat16, batch 64": (
        (functools.partial(KerasResNet50, "mixed_bfloat16"), 64),
        None,
    ),
    "Keras ResNet-50, mixed_float16, batch 64": (
        (functools.partial(KerasResNet50, "mixed_float16"), 64),
        None,
    ),
}

#: Those that are compiled for this CPU, too.
ON_CPU = (
    "chain, 64 layers, 2048 × 256",
    "GPT, 6 layers, batch 8",
    "Transformer, 4 + 4 layers, batch 32",
    "ResNet-56, CIFAR, batch 128",
    "U-Net, 128 px, batch 4",
    "DenseNet, 2 × 12 layers, batch 64",
)

WAYS: dict[str, dict[str, Any]] = {
    "memory": {"checkpoints": "memory", "verify": True},
    "speed": {"checkpoints": "speed", "verify": True},
    "budget 0.5": {"memory_budget": 0.5, "verify": True},
}

# XLA's own rematerialisation is tried with so much memory, as shares of what the step takes.
_LIMITS = (0.9, 0.7, 0.5)


def function_of(
    model: Model, batch: int, differentiate: Callable[..., list]
) -> tuple[tf.types.experimental.GenericFunction, list[tf.Tensor]]:
    """A model's compiled step, and what to call it with."""

    @tf.function(jit_compile=True, autograph=False)
    def step(*inputs: tf.Tensor) -> tuple[tf.Tensor, list]:
        loss = model.loss(*inputs)
        return loss, differentiate(loss, [*model.variables])

    return step, [tf.constant(array) for array in model.example(batch)]


def ours(make: Callable[[], Model], batch: int, device: str, options: dict) -> dict[str, Any]:
    """What a compiled step of ours takes, and what its plan says."""
    model = make()
    differentiate = functools.partial(gradients, device=device, **options)
    try:
        step, inputs = function_of(model, batch, differentiate)
        (plan,) = get_plans(step.get_concrete_function(*inputs).graph)
    except ValueError as error:  # no plan within the budget
        return {"error": str(error)}
    return {"bytes": compiled_temporaries(step, *inputs, device=device)} | planned(plan)


def blockwise(
    make: Callable[[], Model], batch: int
) -> tuple[tf.types.experimental.GenericFunction, list[tf.Tensor]] | None:
    """The step with `tf.recompute_grad` around each block of a network; None if it names none."""
    model = make()
    model.loss(*(tf.constant(array) for array in model.example(batch)))  # makes the variables
    around: list[Callable] = []

    def block(part: Callable[..., tf.Tensor], *inputs: tf.Tensor) -> tf.Tensor:
        around.append(part)
        return tf.recompute_grad(part)(*inputs)

    model.block = block  # type: ignore[method-assign]
    step, inputs = function_of(model, batch, tf.gradients)
    step.get_concrete_function(*inputs)
    return (step, inputs) if around else None


def program_of(step: tf.types.experimental.GenericFunction, inputs: list[tf.Tensor]) -> bytes:
    """What TensorFlow hands to XLA, as an `HloModuleProto` that StableHLO can tell."""
    program = step.experimental_get_compiler_ir(*inputs)(stage="hlo_serialized")
    return tf_private.for_stablehlo(program)


def work_of(label: str) -> dict[str, dict[str, Any]]:
    """What each way computes, against the plain step, and what its program consists of."""
    (make, batch), _ = COMPILED[label]
    step, inputs = function_of(make(), batch, tf.gradients)
    plain = contents(step, inputs)
    rows: dict[str, dict[str, Any]] = {"tf.gradients": plain}
    for way, options in WAYS.items():
        differentiate = functools.partial(gradients, device=GPU, **options)
        step, inputs = function_of(make(), batch, differentiate)
        ops = step.get_concrete_function(*inputs).graph.get_operations()
        rows[way] = {"gates": sum(map(kinds.is_gate, ops))} | contents(step, inputs)
    if (found := blockwise(make, batch)) is not None:
        rows["tf.recompute_grad by block"] = contents(*found)
    for row in rows.values():
        row["work"] = row["multiplications"] / plain["multiplications"]
        row["traffic"] = row["bytes_accessed"] / plain["bytes_accessed"]
        row["time_ratio"] = row["seconds"] / plain["seconds"]
    return rows


def contents(
    step: tf.types.experimental.GenericFunction, inputs: list[tf.Tensor]
) -> dict[str, Any]:
    """What XLA:GPU makes of a step: kernels, loops, bytes moved, and the roofline's estimate."""
    with tempfile.NamedTemporaryFile(suffix=".hlo") as file:
        Path(file.name).write_bytes(program_of(step, inputs))
        report = described(Path(file.name))
    del report["temporary_bytes"]
    return report


def described(path: Path, memory: int | None = None) -> dict[str, Any]:
    """What `described_gpu` says of the program in a file, and how long it would take."""
    optimised = path.with_suffix(".txt")
    limit = "" if memory is None else str(memory)
    command = [sys.executable, described_gpu.__file__, GPU, str(path), limit, str(optimised)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    program = optimised.read_text()
    optimised.unlink()
    return json.loads(ran.stdout) | roofline.estimate(program, GPU)._asdict()


def by_xla(make: Callable[[], Model], batch: int, folder: Path, plain: int) -> int:
    """The fewest bytes that XLA's own rematerialisation reaches."""
    step, inputs = function_of(make(), batch, tf.gradients)
    path = folder / "plain.hlo"
    path.write_bytes(program_of(step, inputs))
    return min(described(path, int(share * plain))["temporary_bytes"] for share in _LIMITS)


def in_jax(network: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The bytes, and the estimated seconds, of each way of `jax.checkpoint`."""
    command = [sys.executable, "-m", "scripts.benchmarks.peers_jax", network, str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for way, file in json.loads(ran.stdout.splitlines()[-1]).items():
        report = described(folder / file)
        yield way, {"bytes": report["temporary_bytes"], "seconds": report["seconds"]}


def rows_of(label: str) -> dict[str, dict[str, Any]]:
    """All ways on one network, each with what it takes on a device."""
    (make, batch), network = COMPILED[label]
    rows: dict[str, dict[str, Any]] = {}
    for device in (GPU, "cpu") if label in ON_CPU else (GPU,):
        step, inputs = function_of(make(), batch, tf.gradients)
        plain = compiled_temporaries(step, *inputs, device=device)
        rows.setdefault("tf.gradients", {})[device] = {"bytes": plain}
        for way, options in WAYS.items():
            rows.setdefault(way, {})[device] = ours(make, batch, device, options)
    plain = rows["tf.gradients"][GPU]["bytes"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (found := blockwise(make, batch)) is not None:
            step, inputs = found
            size = compiled_temporaries(step, *inputs, device=GPU)
            rows["tf.recompute_grad by block"] = {GPU: {"bytes": size}}
        rows["XLA's own rematerialisation"] = {GPU: {"bytes": by_xla(make, batch, folder, plain)}}
        for way, taken in in_jax(network, folder) if network else ():
            rows[way] = {GPU: taken}
    return rows


def gate_seconds(device: str, gates: int = 200) -> float:
    """What a gate adds to a program for this CPU: a chain of small ops with gates, and without."""

    def chain(gated: bool) -> tf.types.experimental.GenericFunction:
        @tf.function(jit_compile=True, autograph=False)
        def run(x: tf.Tensor) -> tf.Tensor:
            for _ in range(gates):
                y = tf.sin(x)
                if gated:
                    (x,), _ = gate.passed([x], [y], barrier=False)
                x = x + y
            return x

        return run

    x = tf.ones([1024])

    def step(gated: bool) -> Callable[[], Any]:
        program = chain(gated)
        program(x)
        return lambda: program(x).numpy()

    times = timed({"plain": step(False), "gated": step(True)}, "plain")
    return (times["gated"]["seconds"] - times["plain"]["seconds"]) / gates


SECTIONS = {
    "networks": Section(COMPILED, rows_of),
    "work": Section(COMPILED, work_of),
    "gate_seconds": Section(["cpu"], gate_seconds),
}
