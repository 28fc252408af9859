"""Budgets on the hard graphs of tests/corpus.py: does a run keep them?

With oneDNN and a thread for each core, as TensorFlow is installed. On 2 cores it takes about five
minutes.
"""

from __future__ import annotations

import functools

from memory_saving_gradients import BudgetError, gradients
from scripts.benchmarks.common import Section, in_session
from tests.corpus import CORPUS, LARGE

SHARES = (0.7, 0.3)
RUNS = 2  # the higher peak counts

#: Those whose variables Keras makes outside the graph of a session, and those that take too long.
_LEFT_OUT = ("Keras LSTM", "bidirectional GRU, recurrent dropout", *LARGE)


def within(name: str, budget: float | str) -> dict[str, int | None] | None:
    """Predicted and measured bytes of a budget, or the lowest that can be met."""
    make, batch = CORPUS[name]
    differentiate = functools.partial(gradients, memory_budget=budget)
    try:
        step = in_session(make, batch, differentiate, runs=RUNS)
    except BudgetError as error:
        return {"lowest": error.lowest_peak_bytes}
    if step.plan is None:
        return None
    return {
        "budget": step.plan.budget_bytes,
        "predicted": step.plan.peak_bytes,
        "measured": step.peak_bytes,
    }


def measured(name: str) -> dict[str, dict | None]:
    """Of one graph: every budget, and the lowest that can be met."""
    found = {f"{share:g}": within(name, share) for share in SHARES}
    if lowest := (within(name, 0.01) or {}).get("lowest"):
        found["lowest"] = within(name, f"{lowest}B")
    return found


SECTIONS = {
    "default": Section(
        [name for name in CORPUS if name not in _LEFT_OUT], measured, {"PYTHONWARNINGS": "ignore"}
    )
}
