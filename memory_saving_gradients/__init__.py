"""Train networks that do not fit into memory, on TensorFlow."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import memory_saving_gradients._quiet  # noqa: F401  (it comes first)
from memory_saving_gradients.by_hand.checkpoint import checkpoint
from memory_saving_gradients.by_hand.loop import checkpoint_loop
from memory_saving_gradients.by_hand.sequential import checkpoint_sequential
from memory_saving_gradients.doors.gradients import (
    gradients,
    gradients_collection,
    gradients_memory,
    gradients_speed,
)
from memory_saving_gradients.doors.max_batch import MaxBatch, max_batch
from memory_saving_gradients.doors.patching import patch
from memory_saving_gradients.doors.tape import GradientTape
from memory_saving_gradients.options.budgets import BudgetError
from memory_saving_gradients.plans.plan import Plan
from memory_saving_gradients.plans.registry import get_plans

if TYPE_CHECKING:
    from memory_saving_gradients import keras

__all__ = [
    "BudgetError",
    "GradientTape",
    "MaxBatch",
    "Plan",
    "checkpoint",
    "checkpoint_loop",
    "checkpoint_sequential",
    "get_plans",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "keras",
    "max_batch",
    "patch",
]


def __getattr__(name: str) -> ModuleType:
    """Loads `keras` on first use: a project may have another package of that name."""
    if name == "keras":
        return importlib.import_module("memory_saving_gradients.keras")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
