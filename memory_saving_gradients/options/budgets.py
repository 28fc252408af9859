"""Memory budgets as users write them, and the error if no plan can meet one."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from typing import Any

from memory_saving_gradients.graph.tf_private import Refusal

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", 1)}

_UNDERSTOOD = (
    'must be a number of bytes (int), a string such as "800MB", "1.5GiB" or "device", or a float '
    "above 0 and up to 1, the share of the step's baseline peak"
)
#: An int below this is surely not meant as a number of bytes.
LEAST_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class OfDevice:
    """A budget relative to the memory of the device.

    Attributes:
        share: the share of it that may be used; the rest is for the allocator's overhead.
    """

    share: float = 0.9


class BudgetError(Refusal, ValueError):
    """No plan within the budget was found; the graph is as `tf.gradients` leaves it.

    Attributes:
        budget_bytes: the budget, in bytes.
        lowest_peak_bytes: the lowest peak found, in bytes.
    """

    def __init__(self, message: str, budget_bytes: int, lowest_peak_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.lowest_peak_bytes = lowest_peak_bytes


def parse_budget(budget: Any, name: str = "memory_budget") -> int | float | OfDevice:
    """A budget as bytes (int), as a share of the baseline peak (float), or as a share of a device.

    Args:
        budget: an int in bytes; a string with a decimal (`"800MB"`) or binary unit (`"1.5GiB"`);
            `"device"` or `"80% of device"`; or a float, 0 < budget <= 1.
        name: the name of the option, for errors.

    Returns:
        Bytes as an int, a share as a float, or the share of a device.

    Raises:
        TypeError: it is of another type.
        ValueError: it is not positive, an int below 1 MiB, a float above 1, or no number with a
            known unit.

    Example:
        >>> parse_budget("1.5GiB"), parse_budget(0.5)
        (1610612736, 0.5)
    """
    if isinstance(budget, str) and budget.strip().lower().endswith("device"):
        return _of_device(budget)
    if isinstance(budget, str):
        if meant := _share_meant(budget):
            raise ValueError(f"{name}={budget!r}: did you mean the number {meant:g}?")
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?)b?\s*", budget.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{name} {_UNDERSTOOD}; got {budget!r}")
        value: int | float = int(float(match[1]) * _UNITS[match[2]])
    elif isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise TypeError(f"{name} {_UNDERSTOOD}; got {budget!r} of type {type(budget).__name__}")
    elif isinstance(budget, numbers.Integral):
        value = int(budget)
        if 0 < value < LEAST_BYTES:
            share = f"{value / 100} or " if value <= 100 else ""
            raise ValueError(
                f"{name}={value} would be {value} bytes: did you mean {share}"
                f'"{value}MB"? If you mean bytes, say "{value}B".'
            )
    else:
        value = float(budget)
        if math.isnan(value) or value > 1:
            raise ValueError(f"{name} {_UNDERSTOOD}; got {budget!r}. For bytes, give an int.")
    if value <= 0:
        raise ValueError(f"{name} {_UNDERSTOOD}; got {budget!r}, which is not above 0")
    return value


def _share_meant(budget: str) -> float | None:
    """What "0.5" or "50%" surely mean."""
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*(%?)\s*", budget)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    return share if 0 < share < 1 else None


def _of_device(budget: str) -> OfDevice:
    match = re.fullmatch(r"\s*(?:(\d+(?:\.\d*)?)\s*%\s*of\s+)?device\s*", budget.lower())
    share = float(match[1]) / 100 if match and match[1] else OfDevice.share
    if match is None or not 0 < share <= 1:
        raise ValueError(
            f'a budget of the device is "device", which is "{OfDevice.share:.0%} of device", or '
            f'another share of it up to "100% of device"; got {budget!r}'
        )
    return OfDevice(share)
