"""The bytes of a budget: those of a device are its memory, less what is there beside the step."""

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
        OSError: the system does not tell what it has.
    """
    if isinstance(request.budget, float):
        return int(request.budget * plain_peak(reading.problem))
    if not isinstance(request.budget, OfDevice):
        return request.budget
    has, used = device_bytes(request.device)
    graph = reading.step.graph
    variables = _variables(graph)
    # Those of a session come to be when it runs; others are there, which the system has seen.
    there = graph.building_function and used is None
    taken = (0 if there else max(variables, used or 0)) + _inputs(reading)
    left = max(int(request.budget.share * has) - taken, 1)
    logger.info(
        "memory_budget of %.0f%% of the device: %s of %s, beside variables and inputs",
        100 * request.budget.share,
        format_bytes(left),
        format_bytes(has),
    )
    return left


def device_bytes(device: str = "cpu") -> tuple[int, int | None]:
    """The memory of the device that a step is for, and what is in use of it, in bytes.

    That is a GPU that is named, else the first one of this machine; without any it is what the
    system has free, in which nothing is in use: None.
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
    """The bytes of what a step is fed."""
    total = 0
    for op in reading.step.needed:
        if op.type == "Placeholder":
            sizes = reading.sizes.of(op.name, told(op.outputs[0])) or []
            total += bytes_of(filled(sizes, reading.batch_size or 1), op.outputs[0].dtype)
    return total
