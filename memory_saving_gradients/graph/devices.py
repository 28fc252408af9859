"""Devices to estimate costs for."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.graph.tf_private import local_devices

#: `DeviceProperties` fields: clock in MHz, caches and memory in bytes, bandwidth in kB/s.
Device: TypeAlias = dict[str, Any]


#: How many multiply-adds one multiprocessor does in a cycle, by its architecture, as multiples of
#: the 64 that TensorFlow's estimator assumes. On an A100, an H100 and a B200 these are the tensor
#: cores, which multiply float32 as TF32 by default; kernels reach about half of their rate.
_TIMES_64 = {"8.0": 4, "8.6": 2, "8.9": 2, "9.0": 8, "10.0": 16}


def _gpu(multiprocessors: int, mhz: int, architecture: str, gb_per_second: int) -> Device:
    return {
        "type": "GPU",
        "num_cores": multiprocessors,
        "frequency": mhz,
        "bandwidth": gb_per_second * 10**6,
        "environment": {"architecture": architecture},
    }


#: One core of a common processor, and GPUs by their data sheets. TensorFlow's estimator assumes one
#: multiply-add a cycle for a CPU core, so a core whose vector units do 32 is described as 32 cores.
DEVICES: dict[str, Device] = {
    "cpu": {
        "type": "CPU",
        "frequency": 2600,
        "num_cores": 64,
        "l1_cache_size": 32 * 2**10,
        "l2_cache_size": 2**20,
        "l3_cache_size": 30 * 2**20,
        "bandwidth": 20 * 2**20,
    },
    "t4": _gpu(40, 1590, "7.5", 320),
    "v100": _gpu(80, 1530, "7.0", 900),
    "a100": _gpu(108, 1410, "8.0", 1555),
    "h100": _gpu(132, 1830, "9.0", 3350),
}

#: The memory of the GPUs, in bytes, by their data sheets; of two variants the smaller one.
MEMORY_BYTES = {"t4": 16 * 10**9, "v100": 16 * 10**9, "a100": 40 * 10**9, "h100": 80 * 10**9}

#: The name of this machine's device: its first GPU, or else its CPU.
LOCAL = "local"


def usual() -> str:
    """What costs are estimated for by default: this machine's first GPU, else a common CPU."""
    return LOCAL if tf.config.list_physical_devices("GPU") else "cpu"


def check_device(device: object) -> None:
    """Raises a ValueError if `device` names no known device, and is not None."""
    if device is not None and device != LOCAL and device not in DEVICES:
        known = ", ".join(f'"{name}"' for name in [*DEVICES, LOCAL])
        raise ValueError(f"device must be one of {known}; got {device!r}")


def described(device: str) -> Device:
    """The description of a device by its name, as TensorFlow's estimator should see it."""
    if device == LOCAL:
        found = max(local_devices(), key=lambda properties: properties["type"] == "GPU")
    else:
        found = DEVICES[device]
    if found["type"] != "GPU":
        return found
    return found | {"num_cores": _times_64(found) * found["num_cores"]}


def multiprocessors(gpu: Device) -> int:
    """The number of multiprocessors of a GPU that is described for TensorFlow's estimator."""
    return int(gpu["num_cores"]) // _times_64(gpu)


def _times_64(gpu: Device) -> int:
    return _TIMES_64.get(gpu.get("environment", {}).get("architecture"), 1)


def local_gpu_bytes() -> int | None:
    """The bytes that TensorFlow may use on this machine's first GPU; None without a GPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    sizes = [each.get("memory_size", 0) for each in local_devices() if each["type"] == "GPU"]
    limits = [
        each.memory_limit * 2**20  # MiB
        for each in tf.config.get_logical_device_configuration(gpus[0]) or []
        if each.memory_limit
    ]
    return min([*sizes[:1], *limits[:1]], default=None)
