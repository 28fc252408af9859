"""What stands in the way of a lower peak, and what to try."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from memory_saving_gradients.planning.keep import kept_tensors
from memory_saving_gradients.planning.plan_data import PlanData
from memory_saving_gradients.report import facts

if TYPE_CHECKING:
    from memory_saving_gradients.planning.problem import Problem

# A kind of tensors that holds less than this share of the peak is no obstacle.
_MUCH = 0.25
# Characters of a line of code.
_WIDTH = 60

_TRY = {
    facts.OF_WEIGHTS: (
        "neither recomputation nor a smaller batch makes these smaller. Try to train fewer weights "
        "(freeze layers), or look up rows of a table with tf.nn.embedding_lookup or tf.gather, "
        "whose gradient is sparse"
    ),
    facts.GRADIENT: (
        "these are gradients of activations, short-lived but large. Try a smaller "
        "batch, or pieces=True, which computes such tensors on slices of their rows"
    ),
    facts.SUM: (
        "these are sums of the gradients of all readers of a tensor. Try to read it in fewer "
        "places, or a smaller batch"
    ),
    facts.UPDATE: (
        "the optimizer needs these for its largest variable. Try an optimizer with less state "
        "(SGD), or split that variable"
    ),
    facts.RECOMPUTED: (
        "these are recomputed together, as nothing between them is kept. Try checkpoints between "
        "them, or a memory_budget, which may run ops more often"
    ),
    facts.ACTIVATION: (
        "the forward pass needs these at once, whatever is kept. Try a smaller batch, or compute "
        "the layer in parts"
    ),
    facts.SCRATCH: "one kernel needs this besides its inputs and outputs. Try a smaller batch",
}


def in_the_way(plan: PlanData) -> str:
    """What holds the peak of a plan, largest first, and what to try: a few sentences."""
    peak = facts.at_peak(plan)
    sentences = []
    for kind, size in peak.by_kind.items():
        if size < _MUCH * peak.bytes:
            continue
        layer = next(held for held in peak.held if held.kind == kind)
        name = kind if kind == facts.SCRATCH or size == layer.bytes else _several(kind)
        where = facts.shortened(layer.origin, _WIDTH)
        if layer.bytes < 0.9 * size:
            where = f"{len([h for h in peak.held if h.kind == kind])} layers, the largest {where}"
        advice = _TRY.get(kind) or _kept_advice(plan)
        sentences.append(f"{size / peak.bytes:.0%} of the peak is {name} ({where}): {advice}.")
    return " ".join(sentences)


def _several(kind: str) -> str:
    """The plural of a kind."""
    word, of, rest = kind.partition(" of ")
    return f"{word}s{of}{rest}"


def _origin(problem: Problem, tensor: int) -> int:
    """The op that a kept tensor comes from, traced back through element-wise ops of equal size."""
    maker = problem.made_by[tensor]
    for _ in range(_STEPS_BACK):
        op = problem.ops[maker]
        if maker < 0 or op.pinned or not op.in_place or len(op.inputs) != 1:
            break
        maker = problem.made_by[op.inputs[0]]
    return maker


# The most element-wise ops between random numbers and the tensor that is kept.
_STEPS_BACK = 4


def _kept_advice(plan: PlanData) -> str:
    """Why so many activations are kept, and what to try."""
    problem = plan.problem
    sizes: collections.Counter[str] = collections.Counter()
    given = set(plan.given)
    plain = {loop.name: loop.why for loop in plan.loops if loop.why}
    for t in kept_tensors(problem, plan.schedule):
        tensor, maker = problem.tensors[t], _origin(problem, t)
        if tensor.name in given:
            sizes["given"] += tensor.bytes
        elif maker >= 0 and problem.ops[maker].name in plain:
            sizes[f"loop {problem.ops[maker].name}"] += tensor.bytes
        elif maker >= 0 and problem.ops[maker].pinned:
            kind = plan.labels.types[maker] if plan.labels.types else "state"
            sizes[f"pinned {kind}"] += tensor.bytes
        else:
            sizes["chosen"] += tensor.bytes
    why = sizes.most_common(1)[0][0] if sizes else "chosen"
    if why.startswith("loop "):
        return (
            f"the {why} keeps most of these for its gradient, one for each round, and "
            f"its rounds cannot be recomputed: {plain[why.removeprefix('loop ')]}"
        )
    if why == "given":
        return "you gave most of these as checkpoints. Try fewer of them"
    if why.startswith("pinned"):
        return (
            f"most of these come from ops that must not run twice ({why.removeprefix('pinned ')}). "
            "Try a form without state: stateless random numbers, tf.while_loop of TensorFlow 2, "
            "a tf.function instead of a py_function"
        )
    if plan.strategy in ("collection", "list", "policy"):
        return (
            "tensors after the last checkpoint are kept, and so are those that are read between "
            "checkpoints. Try checkpoints that are spread over the network, or "
            'checkpoints="memory"'
        )
    if plan.strategy == "speed":
        return 'checkpoints="speed" keeps what is expensive to recompute. Try "memory", or a budget'
    return "the best plan found keeps these. Try a memory_budget, which may run ops more often"
