"""What a user calls the ops and tensors of a step. No planner looks at it."""

from __future__ import annotations

import collections
import dataclasses
import functools

from memory_saving_gradients.planning.problem import Problem


@dataclasses.dataclass(frozen=True)
class Labels:
    """Names for people, by index in a problem; all empty for a problem of no graph.

    Attributes:
        types: the type of each op, such as "Conv2D".
        origins: the layer (its scope, or the user's line of code) that each op comes from.
        shapes: the shape of each tensor as the graph has it; None for an unknown rank, or size.
        dtypes: the dtype of each tensor, such as "float32".
        of_weights: the tensors of the backward pass that have the shape of a variable: gradients
            of weights, mostly.
        sums: the tensors that are sums of gradients.
        updates: the tensors that what comes after the backward pass makes: updates of variables.
        waited_for: the name of the op that needs most gradients, and that updates of variables wait
            for, such as a global norm; empty for none.
        reordered: the names of sums that add their terms in another order than in the plain step,
            so that they are equal to it to rounding only.
    """

    types: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    shapes: tuple[tuple[int | None, ...] | None, ...] = ()
    dtypes: tuple[str, ...] = ()
    of_weights: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    updates: frozenset[int] = frozenset()
    waited_for: str = ""
    reordered: tuple[str, ...] = ()

    @functools.cached_property
    def common(self) -> str:
        """The scope that most ops lie in, such as a model's name, with its "/"; "" for none."""
        heads = collections.Counter(
            origin.partition("/")[0] for origin in self.origins if "/" in origin
        )
        head, count = heads.most_common(1)[0] if heads else ("", 0)
        return f"{head}/" if 2 * count > len(self.origins) else ""

    def origin(self, problem: Problem, op: int) -> str:
        """Where an op comes from, within `common`; its name, where nothing tells."""
        label = (self.origins[op] if self.origins else "") or problem.ops[op].name
        return label.removeprefix(self.common)

    def shape(self, tensor: int) -> str:
        """The shape of a tensor, as Keras writes it."""
        if not self.shapes:
            return ""
        shape = self.shapes[tensor]
        return "?" if shape is None else f"({', '.join(map(str, shape))})"
