"""What a user calls the ops and tensors of a step. No planner looks at it."""

from __future__ import annotations

import dataclasses

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
    """

    types: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    shapes: tuple[tuple[int | None, ...] | None, ...] = ()
    dtypes: tuple[str, ...] = ()
    of_weights: frozenset[int] = frozenset()

    def origin(self, problem: Problem, op: int) -> str:
        """Where an op comes from; its name, where nothing tells."""
        return (self.origins[op] if self.origins else "") or problem.ops[op].name

    def shape(self, tensor: int) -> str:
        """The shape of a tensor, as Keras writes it."""
        if not self.shapes:
            return ""
        shape = self.shapes[tensor]
        return "?" if shape is None else f"({', '.join(map(str, shape))})"
