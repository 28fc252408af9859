"""The argument `checkpoints`: its forms, and the tensors that it selects."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph.order import leading_to
from memory_saving_gradients.options.budgets import parse_budget
from memory_saving_gradients.planning.strategies import STRATEGIES

#: The graph collection that `"collection"` reads.
COLLECTION = "checkpoints"

Checkpoints: TypeAlias = (
    str
    | Callable[[tf.Operation], bool]
    | tf.Tensor
    | tf.Operation
    | re.Pattern
    | Sequence[str | re.Pattern | tf.Tensor | tf.Operation]
)

_CHOOSE_BY_THEMSELVES = ", ".join(f'"{name}"' for name in sorted(STRATEGIES))


def resolve(
    checkpoints: Any, forward: dict[str, tf.Operation], graph: tf.Graph
) -> tuple[str, list[tf.Tensor] | None]:
    """The strategy and the tensors that `checkpoints` selects.

    Args:
        checkpoints: the user's argument; see `gradients`.
        forward: the forward graph, from `forward_operations`.
        graph: the graph of these ops.

    Returns:
        The name of the strategy, and the tensors to keep; None for a strategy that chooses
        checkpoints by itself.

    Raises:
        TypeError: `checkpoints` is of an unsupported type.
        ValueError: a checkpoint is not in the forward graph, a name matches nothing, the
            collection is empty, or the strategy is unknown.
    """
    check_checkpoints(checkpoints)
    if isinstance(checkpoints, str):
        if checkpoints in STRATEGIES:
            return checkpoints, None
        return "collection", _collected(graph, forward)
    if callable(checkpoints) and not tf.is_tensor(checkpoints):
        return "policy", [t for op in forward.values() if checkpoints(op) for t in op.outputs]
    if isinstance(checkpoints, tf.Tensor | tf.Operation | re.Pattern):
        checkpoints = [checkpoints]
    items = list(checkpoints)
    matches = [_tensors(item, forward, graph) for item in items]
    chosen = [t for tensors in matches for t in tensors]
    unmatched = [_pattern(i) for i, tensors in zip(items, matches, strict=True) if not tensors]
    if unmatched:
        _complain(unmatched, bool(chosen))
    if not chosen:
        raise ValueError(
            "checkpoints is an empty list: name at least one tensor, or use a strategy that "
            f"chooses by itself ({_CHOOSE_BY_THEMSELVES})"
        )
    return "list", chosen


def check_checkpoints(checkpoints: Any) -> None:
    """Raises if `checkpoints` is invalid for any graph; see `resolve`."""
    if isinstance(checkpoints, str):
        if checkpoints != "collection" and checkpoints not in STRATEGIES:
            known = ", ".join(f'"{name}"' for name in ["collection", *STRATEGIES])
            hint = "Put a single name into a list."
            with contextlib.suppress(ValueError):
                parse_budget(checkpoints)
                hint = f'Did you mean memory_budget="{checkpoints}"?'
            raise ValueError(
                f'unknown strategy "{checkpoints}": checkpoints must be one of {known}, a list '
                "of tensors, names or regular expressions, or a function from a tf.Operation to "
                f"bool. {hint}"
            )
    elif not (
        callable(checkpoints)
        or isinstance(checkpoints, tf.Tensor | tf.Operation | re.Pattern)
        or (isinstance(checkpoints, Iterable) and not isinstance(checkpoints, dict))
    ):
        hint = f". Did you mean memory_budget={checkpoints}?" * isinstance(checkpoints, float)
        raise TypeError(
            f"checkpoints must be a strategy, a function, or a list of tensors and names, "
            f"got {checkpoints!r} of type {type(checkpoints).__name__}{hint}"
        )


def is_empty_collection(checkpoints: Any, graph: tf.Graph) -> bool:
    """Whether `checkpoints` is the default, and the collection is empty."""
    return isinstance(checkpoints, str) and (
        checkpoints == "collection" and not graph.get_collection(COLLECTION)
    )


def forward_operations(ys: Iterable[tf.Tensor]) -> dict[str, tf.Operation]:
    """The ops that any y depends on, by name."""
    return {op.name: op for op in reversed(leading_to(y.op for y in ys))}


def _collected(graph: tf.Graph, forward: dict[str, tf.Operation]) -> list[tf.Tensor]:
    """The tensors of the collection that belong to this forward graph."""
    items = graph.get_collection(COLLECTION)
    for item in items:
        if not isinstance(item, tf.Tensor | tf.Operation):
            raise TypeError(
                f'the collection "{COLLECTION}" must hold tensors and ops, got {item!r} of type '
                f"{type(item).__name__}"
            )
    tensors = [t for item in items for t in getattr(item, "outputs", [item])]
    ours = [t for t in tensors if t.graph is graph and forward.get(t.op.name) is t.op]
    if not ours:
        state = f"holds {len(tensors)} tensors, none of them in" if tensors else "is empty in"
        raise ValueError(
            f'the collection "{COLLECTION}" {state} the forward graph of ys and xs. Fill it with '
            f'tf.compat.v1.add_to_collection("{COLLECTION}", tensor) while the model is built, or '
            f"use a strategy that chooses by itself: checkpoints={_CHOOSE_BY_THEMSELVES}."
        )
    return ours


def _tensors(item: Any, forward: dict[str, tf.Operation], graph: tf.Graph) -> Sequence[tf.Tensor]:
    """The tensors that one entry of a list of checkpoints selects."""
    if isinstance(item, tf.Operation):
        for tensor in item.outputs:
            _check_in_forward(tensor, forward, graph)
        return item.outputs
    if isinstance(item, str | re.Pattern):
        return _named(item, forward)
    if not tf.is_tensor(item) or isinstance(item, tf.Variable):
        raise TypeError(
            f"a checkpoint must be a tensor, an op, a name or a regular expression, got {item!r} "
            f"of type {type(item).__name__} (variables are kept anyway)"
        )
    _check_in_forward(item, forward, graph)
    return [item]


def _check_in_forward(tensor: tf.Tensor, forward: dict[str, tf.Operation], graph: tf.Graph) -> None:
    if not isinstance(getattr(tensor, "graph", None), tf.Graph) or is_eager(tensor):
        raise ValueError(
            f"checkpoint {tensor!r} is an eager tensor: checkpoints are tensors of the graph that "
            "is differentiated. Call gradients() and name checkpoints inside a tf.function."
        )
    if tensor.graph is not graph:
        raise ValueError(
            f'checkpoint "{tensor.name}" belongs to another graph than ys: take it from the graph '
            "that is differentiated"
        )
    if forward.get(tensor.op.name) is not tensor.op:
        raise ValueError(
            f'checkpoint "{tensor.name}" is not in the forward graph of ys and xs: no y depends '
            "on it. Leave it out, or differentiate a tensor that depends on it."
        )


def _pattern(item: Any) -> str:
    return item.pattern if isinstance(item, re.Pattern) else getattr(item, "name", item)


def _complain(unmatched: list[str], others: bool) -> None:
    """Reports the entries of a list that match nothing: raises, or warns if others do match."""
    named = ", ".join(f'"{pattern}"' for pattern in unmatched)
    text = (
        f"checkpoint {named}: neither the name of a tensor or op in the forward graph of ys and xs "
        "nor a regular expression that matches one"
    )
    if not others:
        raise ValueError(f"{text}. See op.name, or TensorBoard's graph, for the names of ops.")
    warn(f"{text}; the other checkpoints are kept")


def _named(pattern: str | re.Pattern, forward: dict[str, tf.Operation]) -> list[tf.Tensor]:
    """The forward tensors of that name, or those whose name the expression matches somewhere."""
    if isinstance(pattern, str):
        name, _, index = pattern.partition(":")
        if name in forward:
            outputs = forward[name].outputs
            if not index:
                return list(outputs)
            if index.isdigit() and int(index) < len(outputs):
                return [outputs[int(index)]]
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f'checkpoint "{pattern}" is no regular expression: {error}') from error
    return [t for op in forward.values() for t in op.outputs if expression.search(t.name)]


def is_eager(value: object) -> bool:
    """Whether `value` is a tensor outside any graph."""
    return tf.is_tensor(value) and hasattr(value, "numpy")
