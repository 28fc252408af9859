"""What XLA's compiler allocates for a step, by the compiler's own report. The step does not run.

We compile a copy of the step, with the variables as arguments: for a device of this machine with
TensorFlow, for a described GPU in a separate process, with the compiler that the extra `xla-gpu`
installs (see described_gpu.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from memory_saving_gradients.graph import order, tf_private
from memory_saving_gradients.graph.shapes import InputSizes, Shapes
from memory_saving_gradients.graph.tf_private import Refusal
from memory_saving_gradients.proving import described_gpu
from memory_saving_gradients.reading.backward import BackwardPass

_SCRIPT = Path(described_gpu.__file__)

#: The bytes of the temporaries of programs that were compiled, by device and hash.
_allocated: dict[tuple[str, bytes], int] = {}


class CannotCompile(Refusal, RuntimeError):
    """XLA cannot compile the step, or its compiler is not installed."""


def target(device: str) -> str:
    """The name of the device that is compiled for, if costs are estimated for `device`."""
    return device if device in described_gpu.GPUS else "this machine"


def is_installed(device: str) -> bool:
    """Whether the compiler for a device is installed.

    Args:
        device: a name of `devices.DEVICES`, or "local".
    """
    return device not in described_gpu.GPUS or bool(importlib.util.find_spec("jax_plugins"))


def temporary_bytes(
    function: tf.types.experimental.GenericFunction, inputs: Sequence[Any], device: str
) -> int:
    """The bytes of a compiled function's temporaries: no arguments, results or constants.

    A process compiles a program once: Keras, for one, traces a step twice.

    Args:
        function: a `tf.function` with `jit_compile=True`.
        inputs: its arguments: tensors, or specs of them with whole shapes.
        device: the device to compile for: a GPU by name, or else this machine's own device.

    Raises:
        CannotCompile: XLA cannot compile it, or the compiler for the GPU is not installed.
    """
    if not is_installed(device):
        raise CannotCompile(
            f'device="{device}" needs XLA\'s own compiler to compile the step, which the extra '
            'xla-gpu installs (1.2 GB): pip install "memory_saving_gradients[xla-gpu]"'
        )
    try:
        compiled = function.experimental_get_compiler_ir(*inputs)
        program = tf_private.unnamed(compiled(stage="hlo_serialized"))
        key = device, hashlib.sha256(program).digest()
        if key not in _allocated:
            _allocated[key] = (
                _on_described(tf_private.for_stablehlo(program), device)
                if device in described_gpu.GPUS
                else tf_private.temporary_bytes(compiled(stage="optimized_hlo_proto_serialized"))
            )
    except CannotCompile:
        raise
    except (tf.errors.OpError, RuntimeError, TypeError, ValueError) as error:
        raise CannotCompile(f"XLA cannot compile this step: {error}") from error
    return _allocated[key]


def _on_described(program: bytes, device: str) -> int:
    with tempfile.NamedTemporaryFile(suffix=".hlo") as file:
        file.write(program)
        file.flush()
        command = [sys.executable, str(_SCRIPT), device, file.name]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CannotCompile(f"XLA's compiler for {device} failed: {ran.stderr[-2000:]}")
    return int(json.loads(ran.stdout)["temporary_bytes"])


def as_function(
    step: BackwardPass, returned: Sequence[tf.Tensor], given: InputSizes
) -> tuple[tf.types.experimental.GenericFunction, Sequence[tf.TensorSpec]]:
    """A copy of the step, as it is now, as a function of its inputs, and the specs of the inputs.

    Args:
        step: the step.
        returned: the tensors that the function returns.
        given: what is known of the shapes of its inputs.

    Raises:
        CannotCompile: it is part of another function, whose variables are not known.
    """
    graph = step.graph
    operations = [*order.needed(t.op for t in returned)]
    shapes = Shapes(operations, given)
    captured = tf_private.captured(step.original or graph)
    needed = set(operations)
    # In the order of the graph: the same step, traced again, is the same program.
    placeholders = [
        op.outputs[0] for op in graph.get_operations() if op.type == "Placeholder" and op in needed
    ]
    inputs = [t for t in placeholders if t.name not in captured]
    if any(t.dtype == tf.resource for t in inputs):
        raise CannotCompile("the step reads a variable of an outer function")
    whole = graph.as_graph_def()
    program = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    computed = {op.name for op in operations} - {t.op.name for t in placeholders}
    for node in whole.node:
        if node.name in computed:
            copy = program.node.add()
            copy.CopyFrom(node)
            copy.attr.pop("_class", None)  # colocation
            del copy.input[:]
            copy.input.extend(read for read in node.input if not read.startswith("^"))

    @tf.function(jit_compile=True, autograph=False)
    def function(*values: tf.Tensor) -> list[tf.Tensor]:
        arguments = iter(values)
        stand_for = {
            t.name: tf_private.capture(captured[t.name]) if t.name in captured else next(arguments)
            for t in placeholders
        }
        return tf.graph_util.import_graph_def(
            program, stand_for, [t.name for t in returned], name=""
        )

    return function, [tf.TensorSpec(shapes(t), t.dtype) for t in inputs]
