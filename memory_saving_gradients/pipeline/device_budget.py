"""The bytes of a budget. Of a device, they are its memory less variables and inputs."""

from __future__ import annotations

import logging

import tensorflow as tf

from memory_saving_gradients.graph.devices import MEMORY_BYTES, local_gpu_bytes
from memory_saving_gradients.graph.shapes import bytes_of, filled, told
from memory_saving_gradients.measure import available_bytes
from memory_saving_gradients.options.budgets import OfDevice
from memory_saving_gradients.options.options import Request
from memory_saving_gradients.planning.simulate import plain_peak
from memory_saving_gradients.planning.units import format_bytes
from memory_saving_gradients.reading.read import Reading

logger = logging.getLogger("memory_saving_gradients")


def in_bytes(request: Request, reading: Reading) -> int | None:
    """The budget of a request in bytes; None for no budget.

    Raises:
        OSError: the free memory of the system cannot be read.
    """
    if isinstance(request.budget, float):
        return int(request.budget * plain_peak(reading.problem))
    if not isinstance(request.budget, OfDevice):
        return request.budget
    has, used = device_bytes(request.device)
    graph = reading.step.graph
    variables = _variables(graph)
    # Variables of a session are created when it runs; other variables are there already, and not
    # part of the system's free memory.
    there = graph.building_function and used is None
    taken = (0 if there else max(variables, used or 0)) + _inputs(reading)
    left = max(int(request.budget.share * has) - taken, 1)
    logger.info(
        "memory_budget of %.0f%% of the device: %s of %s, besides variables and inputs",
        100 * request.budget.share,
        format_bytes(left),
        format_bytes(has),
    )
    return left


def device_bytes(device: str | None = None) -> tuple[int, int | None]:
    """The memory of the device of a step, and how much of it is in use, in bytes.

    The device is the GPU that is named, else the first GPU of this machine. Without a GPU it is the
    free memory of the system, and None for its use.
    """
    if device in MEMORY_BYTES:
        return MEMORY_BYTES[device], 0
    total = local_gpu_bytes()
    if total is None:
        return available_bytes(), None
    return total, tf.config.experimental.get_memory_info("GPU:0")["current"]


def _variables(graph: tf.Graph) -> int:
    """The bytes of the variables of a graph."""
    if graph.building_function:
        variables = graph.variables
    else:
        variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    return sum(bytes_of(told(v) or [], v.dtype) for v in variables)


def _inputs(reading: Reading) -> int:
    """The bytes of the inputs that a step is fed."""
    total = 0
    for op in reading.step.needed:
        if op.type == "Placeholder":
            sizes = reading.sizes.of(op.name, told(op.outputs[0])) or []
            total += bytes_of(filled(sizes, reading.batch_size or 1), op.outputs[0].dtype)
    return total
