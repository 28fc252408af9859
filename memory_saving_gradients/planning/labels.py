"""Names and shapes of ops and tensors for reports. No planner reads them."""

from __future__ import annotations

import collections
import dataclasses
import functools

from memory_saving_gradients.planning.problem import Problem


@dataclasses.dataclass(frozen=True)
class Labels:
    """Names for people, by index in a problem; empty for a problem without a graph.

    Attributes:
        types: the type of each op, such as "Conv2D".
        origins: the layer (its scope, or the user's line of code) that each op comes from.
        shapes: the shape of each tensor in the graph; None for an unknown rank or size.
        dtypes: the dtype of each tensor, such as "float32".
        of_weights: the tensors of the backward pass that have the shape of a variable: mostly
            gradients of weights.
        sums: the tensors that are sums of gradients.
        updates: the tensors that ops after the backward pass make: updates of variables.
        waited_for: the name of an op that needs most gradients and that updates of variables wait
            for, such as a global norm; empty for none.
        reordered: the names of sums that add their terms in another order than the plain step, and
            so agree with it only up to rounding.
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
        """The scope of most ops, such as a model's name, with its "/"; "" for none."""
        heads = collections.Counter(
            origin.partition("/")[0] for origin in self.origins if "/" in origin
        )
        head, count = heads.most_common(1)[0] if heads else ("", 0)
        return f"{head}/" if 2 * count > len(self.origins) else ""

    def origin(self, problem: Problem, op: int) -> str:
        """The origin of an op, without the prefix `common`; its name if the origin is unknown."""
        label = (self.origins[op] if self.origins else "") or problem.ops[op].name
        return label.removeprefix(self.common)

    def shape(self, tensor: int) -> str:
        """The shape of a tensor, as Keras writes it."""
        if not self.shapes:
            return ""
        shape = self.shapes[tensor]
        return "?" if shape is None else f"({', '.join(map(str, shape))})"
