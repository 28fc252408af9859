"""Measures peak memory and step time of real runs, to check what plans predict."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import re
import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from memory_saving_gradients.graph.traced import traced
from memory_saving_gradients.proving import compiler
from memory_saving_gradients.runtimes import kernels


@dataclasses.dataclass(frozen=True)
class Event:
    """One allocation of a traced step.

    Attributes:
        micros: when, in microseconds.
        bytes: how much; negative when it is freed.
        node: the node whose kernel allocated it.
    """

    micros: int
    bytes: int
    node: str


def session_events(
    session: tf.compat.v1.Session, fetches: Any, feed_dict: dict | None = None
) -> list[Event]:
    """All allocations of one traced step, in the order of time.

    Args:
        session: the session to run in; run it once before, so that it is built.
        fetches: what to fetch. Ops that no fetch needs do not run.
        feed_dict: the inputs.

    Returns:
        The events, without fed inputs, constants and variables, and without scratch space that a
        kernel allocates and never writes to: it does not become resident.
    """
    with _large_blocks_apart():
        nodes = traced(session, fetches, feed_dict).nodes
    shape_of = _shapes(nodes, feed_dict or {})
    events = [
        Event(record.alloc_micros, size, node.node_name)
        for node in nodes
        for size, record in _touched(node, session.graph, shape_of)
    ]
    return sorted(events, key=lambda event: event.micros)


def _shapes(nodes: Sequence[Any], fed: dict) -> Callable[[tf.Tensor], Sequence[int]]:
    """A function that returns the shapes of tensors in a traced step."""
    known = {
        f"{node.node_name}:{output.slot}": [
            dimension.size for dimension in output.tensor_description.shape.dim
        ]
        for node in nodes
        for output in node.output
    }
    known |= {getattr(one, "name", one): np.shape(value) for one, value in fed.items()}

    def shape_of(tensor: tf.Tensor) -> Sequence[int]:
        static = tensor.shape
        return known[tensor.name] if not static.is_fully_defined() else static.as_list()

    return shape_of


def _touched(
    node: Any, graph: tf.Graph, shape_of: Callable[[tf.Tensor], Sequence[int]]
) -> Iterator[tuple[int, Any]]:
    """The allocation records of a node, each with the bytes that the node writes to."""
    scratch = untouched = 0
    with contextlib.suppress(KeyError):  # an op in a function, or an unknown shape
        op = graph.get_operation_by_name(node.node_name)
        untouched = kernels.untouched(op, shape_of)
        scratch = untouched + kernels.workspace(op, shape_of) if untouched else 0
    for memory in node.memory:
        for record in memory.allocation_records:
            size = record.alloc_bytes
            if untouched and abs(abs(size) - scratch) < _ROUNDING:
                size -= untouched if size > 0 else -untouched
            yield size, record


_ROUNDING = 4096  # an allocation may exceed the requested size by this


@contextlib.contextmanager
def _large_blocks_apart(size: int = 2**20) -> Iterator[None]:
    """Makes glibc allocate blocks of at least `size` bytes outside its heap.

    A traced step leaves small records between the tensors. In the heap they would fragment the
    memory of a deep network, and every further traced step would make it grow.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, size)
    try:
        yield
    finally:
        if mallopt:
            mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that glibc itself sets


_M_MMAP_THRESHOLD = -3  # of malloc.h


def session_peak(session: tf.compat.v1.Session, fetches: Any, feed_dict: dict | None = None) -> int:
    """The most bytes that one real step holds at once, from TensorFlow's allocation records.

    Args:
        session: the session to run in; run it once before, so that it is built.
        fetches: what to fetch.
        feed_dict: the inputs.

    Returns:
        Bytes; fed inputs, constants and variables are not counted.

    Example:
        >>> graph = tf.Graph()
        >>> with graph.as_default():
        ...     y = tf.reduce_sum(tf.random.uniform((1000,)))
        >>> with tf.compat.v1.Session(graph=graph) as session:
        ...     session_peak(session, y) >= 4000
        True
    """
    held = peak = 0
    for event in session_events(session, fetches, feed_dict):
        held += event.bytes
        peak = max(peak, held)
    return peak


# Blocks of at least this many bytes return to the system as soon as they are freed, so that
# resident memory is memory in use.
_APART = 2**16


def function_peak(make_step: Callable[..., Callable[[], Any]], *args: Any) -> int:
    """The most bytes that one step holds at once, measured in a fresh process.

    A `tf.function` has no allocation records, so we measure it by `step_peak`, after two steps to
    warm up.

    Args:
        make_step: called with `args` in the fresh process; returns the step, a function without
            arguments. It must be importable: defined at the top level of a module.
        *args: its arguments; they must be picklable.

    Returns:
        Bytes. Memory that the step keeps from one run to the next is not counted.

    Raises:
        RuntimeError: the process died, or its memory cannot be read (it needs Linux).
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(_APART), "MALLOC_TRIM_THRESHOLD_": str(_APART)}
    return _in_fresh_process(settings, _resident_peak, make_step, args)


def compiled_peak(make_step: Callable[..., Callable[[], Any]], *args: Any) -> int:
    """The bytes that XLA allocates for a compiled step, from its own report, in a fresh process.

    Args:
        make_step: called with `args` in the fresh process; returns the step, a function without
            arguments that calls a `tf.function` with `jit_compile=True`. It must be importable.
        *args: its arguments; they must be picklable.

    Returns:
        Bytes of the largest compiled program; parameters (inputs and variables) are not counted.

    Raises:
        RuntimeError: the process died, or nothing was compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        return _in_fresh_process({"XLA_FLAGS": flags}, _assigned_bytes, make_step, (folder, *args))


def compiled_temporaries(
    function: tf.types.experimental.GenericFunction, *inputs: Any, device: str = "cpu"
) -> int:
    """The bytes that XLA allocates besides arguments and results, for a GPU that may be absent.

    Only the compiler runs.

    Args:
        function: a `tf.function` with `jit_compile=True`.
        *inputs: its arguments: tensors, or `tf.TensorSpec`s with whole shapes.
        device: "t4", "v100", "a100" or "h100", for which the extra `xla-gpu` has the compiler;
            any other value means this machine's own device.

    Returns:
        Bytes. On a GPU, scratch space of autotuned convolutions is not included.

    Raises:
        CannotCompile: XLA cannot compile it, or the extra is missing.

    Example:
        >>> step = tf.function(lambda x: tf.linalg.matmul(x @ x, x @ x), jit_compile=True)
        >>> compiled_temporaries(step, tf.TensorSpec((512, 512))) >= 512 * 512 * 4
        True
    """
    return compiler.temporary_bytes(function, inputs, device)


def _in_fresh_process(
    settings: dict[str, str], measure: Callable[..., int], make_step: Callable, args: Sequence
) -> int:
    """What `measure(make_step, *args)` returns in a process with these environment variables."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        process = context.Process(target=_send, args=(theirs, measure, make_step, args))
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    theirs.close()
    try:
        outcome = ours.recv()
    except EOFError:
        outcome = None
    process.join()
    if not isinstance(outcome, int):
        raise RuntimeError(f"the measuring process failed: {outcome or process.exitcode}")
    return outcome


def _send(
    connection: Any, measure: Callable[..., int], make_step: Callable, args: Sequence
) -> None:
    try:
        connection.send(measure(make_step, *args))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise


def _resident_peak(make_step: Callable, *args: Any) -> int:
    step = make_step(*args)
    for _ in range(2):
        step()
    return step_peak(step)


def step_peak(step: Callable[[], Any]) -> int:
    """The most bytes by which one step makes this process grow: the median of three steps.

    Memory that oneDNN's allocator touches for the first time would count twice (see `StepPeak`);
    after the first step that is rare.

    Args:
        step: the step; run it before, so that it is built.

    Returns:
        Bytes.

    Raises:
        OSError: neither TensorFlow nor the system provides it.
    """
    peaks = []
    for _ in range(3):
        peak = StepPeak()
        with _large_blocks_apart(_APART):
            step()
        peaks.append(peak.bytes())
    return int(statistics.median(peaks))


def _assigned_bytes(make_step: Callable, folder: str, *args: Any) -> int:
    make_step(*args)()
    programs = [
        sum(
            int(size)
            for size, use in re.findall(r"^allocation \d+: size (\d+), (\w+)", text, re.MULTILINE)
            if use != "parameter"
        )
        for text in (path.read_text() for path in Path(folder).glob("*buffer-assignment.txt"))
    ]
    return max(programs)


class StepPeak:
    """The most bytes in use from the creation of this object to a call of `bytes()`.

    On a GPU it is the count of TensorFlow's allocator. On a CPU it is the growth of the process's
    resident memory, from Linux. There oneDNN's allocator keeps tensors of 256 KiB and more in a
    pool, which stays resident, but counts those in use: we add that count. As both rarely peak at
    the same time, a thread reads both every millisecond. Memory that was in use at the start is not
    counted.

    Raises:
        OSError: neither TensorFlow nor the system provides it.
    """

    def __init__(self) -> None:
        self._on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._device: str | None = "GPU:0" if self._on_gpu else "CPU:0"
        try:
            tf.config.experimental.reset_memory_stats(self._device)
            self._allocated = tf.config.experimental.get_memory_info(self._device)["current"]
        except ValueError:  # the allocator does not keep count
            self._device = None
        if not self._on_gpu:
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the highest resident size to the current one
            self._resident = _status("VmRSS")
        self._together = 0  # the most of both
        self._ended = threading.Event()
        if self._device and not self._on_gpu:
            threading.Thread(target=_read_often, args=(weakref.ref(self),), daemon=True).start()

    def bytes(self) -> int:
        """The peak until the first call, above the start."""
        self._ended.set()
        peak = self._together
        if self._device:
            highest = tf.config.experimental.get_memory_info(self._device)["peak"]
            peak = max(peak, highest - self._allocated)
        if not self._on_gpu:
            peak = max(peak, _status("VmHWM") - self._resident)
        return peak

    def _read(self) -> bool:
        """Reads what the pool and the rest of the process take; returns whether to go on."""
        pool = tf.config.experimental.get_memory_info(self._device)["current"] - self._allocated
        self._together = max(self._together, pool + _status("VmRSS") - self._resident)
        return not self._ended.is_set()


def _read_often(meter: weakref.ref[StepPeak]) -> None:
    """Reads a meter every millisecond, until it has ended or is gone."""
    while (alive := meter()) is not None and alive._read():
        del alive
        time.sleep(_PERIOD)


_PERIOD = 0.001  # seconds


def available_bytes() -> int:
    """The memory that this process can still allocate, in bytes: of the machine, or its container.

    Raises:
        OSError: the system does not provide it.
    """
    left = [_status("MemAvailable", "/proc/meminfo")]
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            left.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, min(left))


# The memory limit of a container and its use, for control groups 2 and 1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _status(field: str, path: str = "/proc/self/status") -> int:
    """A field of a status file of Linux, in bytes."""
    with open(path) as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {field}")


def step_times(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each step in each round; steps run in turns, so that noise affects all alike.

    Args:
        steps: the steps by name.
        rounds: how often to run each.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    return times
