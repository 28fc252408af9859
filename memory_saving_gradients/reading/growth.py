"""How the tensors of a step grow with the batch, found when somebody asks for it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping

import tensorflow as tf

from memory_saving_gradients.graph.shapes import InputSizes, Shapes
from memory_saving_gradients.reading.buffers import Buffers
from memory_saving_gradients.runtimes.runtime import Runtime

# The bytes at this many times the batch are compared with those at the batch.
_TIMES = 2


@dataclasses.dataclass(frozen=True)
class Growth:
    """The bytes per example of each tensor, and of each op's scratch space, by name.

    They are close to linear in the batch, so we compare two batch sizes. That takes nearly as long
    as reading, as all shapes are inferred once more. A plan holds this, so it refers to the graph
    weakly, and to ops and tensors by name.

    Attributes:
        graph: the graph.
        operations: the ops of the step, each after those that it waits for.
        results: the tensors that live to the end of the step.
        runtime: the runtime.
        given: what is known of the shapes of the inputs.
        batch_size: the batch; None if the graph fixes it.
        bytes: the bytes of each tensor at that batch.
        scratch: the bytes of the scratch space of each op at that batch.
    """

    graph: weakref.ref[tf.Graph]
    operations: tuple[str, ...]
    results: tuple[str, ...]
    runtime: Runtime
    given: InputSizes
    batch_size: int | None
    bytes: Mapping[str, int]
    scratch: Mapping[str, int]

    def __call__(self) -> dict[str, float]:
        """Finds them; there are none if the graph fixes the batch.

        Raises:
            ValueError: the graph does not exist any more.
        """
        if self.batch_size is None:
            return {}
        graph = self.graph()
        if graph is None:
            raise ValueError(
                "how this plan's step grows with the batch cannot be found any more, as its graph "
                "is gone: call `at` while the function that was planned exists"
            )
        operations = [graph.get_operation_by_name(name) for name in self.operations]
        results = [graph.get_tensor_by_name(name) for name in self.results]
        larger = Shapes(operations, self.given.times(_TIMES, self.batch_size))
        buffers = Buffers(operations, larger, self.runtime, results, self.bytes)
        more = (_TIMES - 1) * self.batch_size
        grown = {
            name: (buffers.bytes(graph.get_tensor_by_name(name)) - size) / more
            for name, size in self.bytes.items()
        }
        for name, size in self.scratch.items():
            op = graph.get_operation_by_name(name)
            needed = self.runtime.scratch(op, larger) + buffers.mask_bytes(op)
            grown[name] = (needed - size) / more
        return grown
