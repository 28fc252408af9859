"""Compiles a program for a GPU that need not be present; run as a script, without TensorFlow.

    python described_gpu.py h100 step.hlo [BYTES [OPTIMISED]]

BYTES is the memory of the GPU, "" for all of it; XLA itself recomputes what does not fit, as far as
it can. OPTIMISED is a file to write the optimised program to, as text. The program is an
`HloModuleProto`, or StableHLO as text in a file that ends in `.mlir`.

Prints, as JSON, the bytes of temporaries that XLA's compiler allocates (the peak without arguments
and results), the bytes that its kernels read and write (XLA's own count), the number of kernels
outside loops and branches, and the number of loops. No driver and no GPU are needed. Kernels are
not autotuned, as that would run them: scratch space of tuned convolutions is not included.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

#: The properties that differ between the supported GPUs, by their data sheets: bytes, bytes per
#: second, GHz.
GPUS: dict[str, dict[str, Any]] = {
    "t4": {
        "core_count": 40,
        "fpus_per_core": 64,
        "threads_per_core_limit": 1024,
        "shared_memory_per_core": 65_536,
        "shared_memory_per_block_optin": 65_536,
        "memory_bandwidth": 320_000_000_000,
        "l2_cache_size": 4_194_304,
        "clock_rate_ghz": 1.59,
        "device_memory_size": 15_843_721_216,
        "cuda_compute_capability": (7, 5),
    },
    "v100": {
        "core_count": 80,
        "fpus_per_core": 64,
        "threads_per_core_limit": 2048,
        "shared_memory_per_core": 98_304,
        "shared_memory_per_block_optin": 98_304,
        "memory_bandwidth": 900_000_000_000,
        "l2_cache_size": 6_291_456,
        "clock_rate_ghz": 1.53,
        "device_memory_size": 16_945_512_448,
        "cuda_compute_capability": (7, 0),
    },
    "a100": {
        "core_count": 108,
        "fpus_per_core": 64,
        "threads_per_core_limit": 2048,
        "shared_memory_per_core": 167_936,
        "shared_memory_per_block_optin": 166_912,
        "memory_bandwidth": 1_555_000_000_000,
        "l2_cache_size": 41_943_040,
        "clock_rate_ghz": 1.41,
        "device_memory_size": 42_505_273_344,
        "cuda_compute_capability": (8, 0),
    },
    "h100": {
        "core_count": 132,
        "fpus_per_core": 128,
        "threads_per_core_limit": 2048,
        "shared_memory_per_core": 233_472,
        "shared_memory_per_block_optin": 232_448,
        "memory_bandwidth": 3_352_320_000_000,
        "l2_cache_size": 52_428_800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 84_942_979_072,
        "cuda_compute_capability": (9, 0),
    },
}

_ALIKE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}


def description(gpu: str, **others: int) -> str:
    """A GPU as XLA's `GpuTargetConfigProto`, in text.

    Args:
        gpu: its name.
        **others: fields to override.
    """
    values = _ALIKE | GPUS[gpu] | others
    major, minor = values.pop("cuda_compute_capability")
    fields = "\n".join(f"  {name}: {value}" for name, value in values.items())
    return (
        f"gpu_device_info {{\n{fields}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 patch: 0 }\n'
        f'device_description_str: "{gpu}"\n'
    )


def main(gpu: str, path: str, memory: str = "", target: str = "") -> None:
    import nvidia.cuda_nvcc

    (tools,) = nvidia.cuda_nvcc.__path__
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={tools}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    import jax_plugins.xla_cuda12
    import numpy as np
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax._src.lib.mlir import ir

    plugin = Path(jax_plugins.xla_cuda12.__file__).with_name("xla_cuda_plugin.so")
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin))
    xla_client.initialize_pjrt_plugin("cuda")
    others = {"device_memory_size": int(memory)} if memory else {}
    described = {"target_config": description(gpu, **others), "topology": "1x1x1"}
    topology = _jax.get_c_api_topology(api, gpu, described)
    device = topology._make_compile_only_devices()[0]
    options = xla_client.CompileOptions()
    options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, 1), np.int32))
    with mlir.make_ir_context():
        written = Path(path).read_bytes()
        is_text = path.endswith(".mlir")
        module = ir.Module.parse(written if is_text else _jax.mlir.hlo_to_stablehlo(written))
    program = device.client.compile(module, _jax.DeviceList((device,)), options)
    (optimised,) = program.hlo_modules()
    counts = _jax.hlo_module_cost_analysis(xla_client.make_cpu_client(), optimised)
    report = {
        "temporary_bytes": program.get_compiled_memory_stats().temp_size_in_bytes,
        "bytes_accessed": int(counts["bytes accessed"]),
    }
    text = optimised.to_string()
    if target:
        Path(target).write_text(text)
    print(json.dumps(report | counted(text)))


#: Instructions of a program optimised by XLA:GPU that run one or a few kernels each.
KERNELS = re.compile(
    r" (?:fusion|custom-call|convolution|dot|copy|reduce|transpose|scatter|sort|fft|cholesky|"
    r"triangular-solve|rng-bit-generator|select-and-scatter|concatenate|dynamic-update-slice)\("
)


def counted(program: str) -> dict[str, int]:
    """The numbers of kernels and loops of an optimised program, given as text."""
    entry = program[program.index("\nENTRY ") :]
    return {"kernels": len(KERNELS.findall(entry)), "whiles": program.count(" while(")}


if __name__ == "__main__":
    main(*sys.argv[1:])
