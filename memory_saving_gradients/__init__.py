"""Train networks that do not fit into memory, on TensorFlow."""

from memory_saving_gradients import keras
from memory_saving_gradients.budgets import BudgetError
from memory_saving_gradients.gradients import (
    gradients,
    gradients_collection,
    gradients_memory,
    gradients_speed,
)
from memory_saving_gradients.patching import patch
from memory_saving_gradients.plan import Plan, get_plans
from memory_saving_gradients.tape import GradientTape

__all__ = [
    "BudgetError",
    "GradientTape",
    "Plan",
    "get_plans",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "keras",
    "patch",
]
