"""How long a program that XLA:GPU has optimised would take, if each kernel met the roofline.

A kernel takes as long as reading its operands and writing its results at the bandwidth of the
memory, or as its multiplications at the rate of the tensor cores, whichever is longer (Williams et
al. 2009), and at least as long as it takes to launch one. This is an estimate of a GPU that is not
there: kernels miss the roofline by different factors, and caches, kernels that run at once, and
operands that are read only in part are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memory_saving_gradients.graph.devices import described
from memory_saving_gradients.proving.described_gpu import KERNELS

# What one kernel takes at least, in seconds: the time to launch it.
_LAUNCH = 2e-6

_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+|f8\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z-]+)\(([^)]*)\)(.*)$", re.M)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*?^}", re.M | re.S)
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)')
_NAME = re.compile(r"%([\w.-]+)")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


class Array(NamedTuple):
    """An array of a program: bytes of an element, and sizes."""

    width: int
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.width * math.prod(self.sizes)


class Instruction(NamedTuple):
    """An instruction of a program, with the arrays that it makes and reads."""

    made: list[Array]
    kind: str
    read: list[Array]
    rest: str


class Estimate(NamedTuple):
    """What one run of a program takes: seconds, and multiplications of products and convolutions.

    Two multiplications of half precision count as one.
    """

    seconds: float
    multiplications: float


def estimate(program: str, gpu: str) -> Estimate:
    """What one run takes.

    Args:
        program: the optimised program, as text.
        gpu: the name of a GPU, such as "h100".
    """
    device = described(gpu)
    a_second = 64 * device["num_cores"] * device["frequency"] * 1e6  # of float32, as TF32
    arrays = {name: _arrays(kind) for name, kind, *_ in _INSTRUCTION.findall(program)}
    work = {
        found[1]: sum(map(_work, _instructions(found[0], arrays)))
        for found in _COMPUTATION.finditer(program)
    }
    total = all_work = 0.0
    for one in _instructions(program[program.index("\nENTRY ") :], arrays):
        if KERNELS.match(f" {one.kind}("):
            called = re.search(r"calls=%([\w.-]+)", one.rest)
            multiplied = work[called[1]] if called else _work(one)
            moved = sum(array.bytes for array in (*one.made, *one.read))
            at_bandwidth = moved / (device["bandwidth"] * 1e3)
            total += max(_LAUNCH, at_bandwidth, multiplied / a_second)
            all_work += multiplied
    return Estimate(total, all_work)


def _arrays(kind: str) -> list[Array]:
    """The arrays of a type, which may be a tuple."""
    widths = {"pred": 1, "bf16": 2}
    return [
        Array(
            widths.get(dtype) or (1 if dtype.startswith("f8") else int(dtype[1:]) // 8),
            tuple(map(int, filter(None, sizes.split(",")))),
        )
        for dtype, sizes in _SHAPE.findall(kind)
    ]


def _instructions(text: str, arrays: Mapping[str, list[Array]]) -> Iterator[Instruction]:
    for name, _, kind, operands, rest in _INSTRUCTION.findall(text):
        read = [one for operand in _NAME.findall(operands) for one in arrays.get(operand, [])]
        yield Instruction(arrays[name], kind, read, rest)


def _work(one: Instruction) -> float:
    """The multiplications of an instruction, as an `Estimate` counts them."""
    if labels := _LABELS.search(one.rest):
        arrays = dict(zip(("lhs", "rhs", "out"), (*one.read[:2], one.made[0]), strict=True))
        # The labels are those of the convolution, of which this may be a gradient.
        if "convBackwardInput" in one.rest:
            arrays["lhs"], arrays["out"] = arrays["out"], arrays["lhs"]
        elif "convBackwardFilter" in one.rest:
            arrays["rhs"], arrays["out"] = arrays["out"], arrays["rhs"]
        out = arrays["out"]
        features = out.sizes[labels[3].index("f")]
        multiplied = math.prod(arrays["rhs"].sizes) * math.prod(out.sizes) / features
    elif contracted := _CONTRACTED.search(one.rest):
        places = re.findall(r"\d+", contracted[1])
        factor = math.prod(one.read[0].sizes[int(place)] for place in places)
        multiplied = factor * math.prod(one.made[0].sizes)
    else:
        return 0.0
    return multiplied / (2 if one.read[0].width == 2 else 1)
