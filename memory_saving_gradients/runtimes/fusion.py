"""Fusion in XLA: the tensors of a step that have no buffer.

XLA fuses element-wise ops, and ops that only move elements, into the kernels that read them. A
fused tensor is recomputed in each reader from its sources, as long as that takes less memory
traffic than writing it once and reading it back (the cost model of XLA:GPU's priority fusion, in
bytes only); XLA:CPU computes no expensive function twice. Matrix products, convolutions,
concatenations and other ops are kernels of their own, which read and write memory; reductions write
their results, but XLA:GPU fuses their producers into them.

tests/runtimes/test_fusion.py compares this with what XLA:CPU compiles for small steps,
scripts/benchmarks/xla.py with what XLA:GPU compiles for the test models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, normalisation, order, tf_private

#: Ops that are fused into their readers. `Slice`, of which the gradients of concatenations are
#: made, is not among them: slices pass gates.
_FUSIBLE = kinds.IN_PLACE | frozenset(
    """Acos Acosh Asin Asinh Atan Atan2 Atanh BroadcastTo Cast Complex Conj Cosh
    DepthToSpace Digamma Equal Erfinv Fill FloorDiv FloorMod FusedBatchNorm FusedBatchNormGrad
    FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Gather GatherV2
    Greater GreaterEqual Imag IsFinite IsInf IsNan Less LessEqual Lgamma LogicalAnd LogicalNot
    LogicalOr MatrixDiagPartV3 MatrixSetDiagV3 MirrorPad Mod NotEqual OneHot OnesLike Pad PadV2
    Range Real ReverseV2 Rint Roll Sinh SoftsignGrad SpaceToDepth Split SplitV StridedSlice
    StridedSliceGrad Tile Transpose Unpack Xlog1py ZerosLike""".split()
)

#: Ops that write their results, but into which XLA:GPU fuses their producers.
_REDUCTIONS = frozenset(
    """All Any ArgMax ArgMin AvgPool AvgPoolGrad BiasAddGrad EuclideanNorm L2Loss Max MaxPool Mean
    Min Prod Sum""".split()
)

#: Ops that XLA:CPU does not compute twice (`InstructionFusion::IsExpensive`).
_ONCE_ON_CPU = frozenset(
    """Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Div DivNoNan Elu Erf Erfc Erfinv Exp
    Expm1 FloorMod Lgamma Log Log1p LogSoftmax Mod Pow RealDiv Reciprocal Rsqrt Selu Sigmoid Sin
    Sinh Softmax Softplus Sqrt Tan Tanh Xdivy Xlog1py Xlogy""".split()
)

# The longest chain of ops that one kernel computes.
_DEEPEST = 64

#: Ops that compute each element from one element of each input of equal size.
ELEMENT_WISE = kinds.IN_PLACE | frozenset(
    """Cast Cosh FloorDiv FloorMod FusedBatchNorm FusedBatchNormGrad FusedBatchNormGradV2
    FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Mod Sinh SoftsignGrad Xlog1py""".split()
)
#: Ops for which XLA:GPU calls cuDNN. A call also returns scratch space, so its result is an element
#: of a tuple; XLA writes over no such element.
_CALLS = frozenset(
    """Conv2D Conv3D Conv2DBackpropInput Conv3DBackpropInputV2 Conv2DBackpropFilter
    Conv3DBackpropFilterV2 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput
    DepthwiseConv2dNativeBackpropFilter""".split()
)

#: Gradients that need of their second input only where it is positive.
_MASKING = frozenset({"LeakyReluGrad", "ReluGrad", "Relu6Grad"})

_SOFTMAX = frozenset({"LogSoftmax", "Softmax"})


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What the kernels of a step read and write.

    Attributes:
        made_of: by name of a tensor that has no buffer, the tensors that it is computed from.
        in_place: the ops that can write over an input that nothing reads later.
        in_place_rewritten: those of them that can do so only once the step is rewritten.
        calls: the ops that a library computes, with results that nothing writes over.
        masked: by op, the inputs of which its first kernel makes masks for the next one.
        accumulated: by name of a tensor that rows are added to in place, the sum.
    """

    made_of: dict[str, tuple[tf.Tensor, ...]]
    in_place: set[tf.Operation]
    in_place_rewritten: set[tf.Operation]
    calls: Collection[tf.Operation] = ()
    masked: dict[tf.Operation, tuple[tf.Tensor, ...]] = dataclasses.field(default_factory=dict)
    accumulated: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)


def kernels(
    operations: Sequence[tf.Operation],
    results: Collection[tf.Tensor],
    bytes_of: Mapping[str, int],
    on_gpu: bool,
) -> Kernels:
    """What the kernels of a step read and write.

    XLA:GPU has one kernel for a softmax, which reads a row before it writes its first element.
    `rewriting.kernels` makes it compute the gradient of logits element by element.

    Args:
        operations: the ops of the step, each after those that it waits for.
        results: the tensors that the step returns.
        bytes_of: the bytes of the tensors of the step, by name.
        on_gpu: whether XLA:GPU compiles it, else XLA:CPU.
    """
    ours = set(operations)
    fusible = _FUSIBLE if on_gpu else _FUSIBLE - kinds.CROSS_ENTROPIES
    into = fusible | _REDUCTIONS if on_gpu else fusible
    element_wise = ELEMENT_WISE - (_SOFTMAX if on_gpu else kinds.CROSS_ENTROPIES)
    returned = {kinds.owner(t).name for t in results}
    calls = {op for op in operations if on_gpu and op.type in _CALLS}
    found = Kernels({}, set(), set(), calls)
    sources_of = found.made_of
    depth: dict[str, int] = {}
    in_order: set[str] = set()  # tensors without a buffer, computed element by element
    of_logits: set[str] = set()
    for op in operations:
        made_of = {s.name: s for t in op.inputs for s in sources_of.get(t.name, (t,))}
        sources = tuple(t for name, t in made_of.items() if bytes_of.get(name, 0))
        read = sum(bytes_of[t.name] for t in sources)
        deep = 1 + max((depth.get(t.name, 0) for t in op.inputs), default=0)
        over_logits = op.type in kinds.CROSS_ENTROPIES or any(
            t.name in of_logits for t in op.inputs
        )
        if on_gpu and (masked := _masked(op, found)):
            found.masked[op] = masked
        orderly = all(t.name in in_order for t in op.inputs if t.name in sources_of)
        for i, tensor in enumerate(op.outputs):
            shown = kinds.shown_input(op, i)
            readers = [reader for reader in order.readers(tensor) if reader in ours]
            times, size = len(readers), bytes_of.get(tensor.name, 0)
            over = orderly and (shown is not None or op.type in element_wise)
            if on_gpu and (dense := _added_to(tensor, readers)) is not None:
                fused = True
                found.accumulated[dense.name] = readers[0].outputs[0]
            elif shown is not None:
                fused = op.inputs[shown].name in sources_of
            else:
                fused = (
                    op.type in fusible
                    and deep < _DEEPEST
                    and not (op.type == "AddN" and tf_private.is_unmerged(op))  # a running sum
                    and tensor.name not in returned
                    and all(reader.type in into for reader in readers)
                    and not any(map(kinds.is_gate, tensor.consumers()))  # a gate passes buffers
                    and (on_gpu or times < 2 or op.type not in _ONCE_ON_CPU)
                    and (times - 1) * read < (times + 1) * size
                )
            if fused:
                sources_of[tensor.name] = sources
                depth[tensor.name] = deep
                if over or all(bytes_of[t.name] < size for t in sources):
                    in_order.add(tensor.name)
                if over and over_logits:
                    of_logits.add(tensor.name)
            elif over:
                found.in_place.add(op)
                if over_logits:
                    found.in_place_rewritten.add(op)
    return found


def _masked(op: tf.Operation, found: Kernels) -> tuple[tf.Tensor, ...]:
    """The inputs of which an earlier kernel makes masks.

    The gradient of a batch normalisation, or what it is fused into, takes two kernels: the first
    one sums the gradients, the second one computes each element. Behind a ReLU both need to know
    where its output is positive: the second one reads that from the mask.
    """
    fused, masked, others = found.made_of, dict[str, tf.Tensor](), set[str]()
    for tensor in map(kinds.owner, op.inputs):
        features = found.masked.get(tensor.op, ()) if tensor.name in fused else ()
        if op.type in normalisation.GRADIENTS and tensor.op.type in _MASKING:
            features = (kinds.owner(tensor.op.inputs[1]),) if tensor.name in fused else ()
        masked.update((t.name, t) for t in features)
        if not features:
            others |= {t.name for t in fused.get(tensor.name, (tensor,))}
    return tuple(t for name, t in masked.items() if name not in others and name not in fused)


def _added_to(tensor: tf.Tensor, readers: Sequence[tf.Operation]) -> tf.Tensor | None:
    """The dense tensor that a sum adds rows to; None if `tensor` is not such rows.

    The gradient of an embedding that is also multiplied with is a sum of a dense tensor and of
    rows. XLA adds each row in place.
    """
    if tensor.op.type != "UnsortedSegmentSum" or [r.type for r in readers] != ["AddN"]:
        return None
    dense = [t for t in readers[0].inputs if t.op.type != "UnsortedSegmentSum"]
    return kinds.owner(dense[0]) if len(dense) == 1 else None
