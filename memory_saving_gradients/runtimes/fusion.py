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

from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from memory_saving_gradients.graph import kinds, order

#: Ops that are fused into their readers. `Slice`, of which the gradients of concatenations are
#: made, is not among them: see `rewriting.gates.Gates`.
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


def unbuffered(
    operations: Sequence[tf.Operation],
    results: Collection[tf.Tensor],
    bytes_of: Mapping[str, int],
    on_gpu: bool,
) -> dict[str, tuple[tf.Tensor, ...]]:
    """The tensors that have no buffer, by name, each with the tensors it is computed from.

    Args:
        operations: the ops of the step, each after those that it waits for.
        results: the tensors that the step returns.
        bytes_of: the bytes of the tensors of the step, by name.
        on_gpu: whether XLA:GPU compiles it, else XLA:CPU.
    """
    ours = set(operations)
    into = _FUSIBLE | _REDUCTIONS if on_gpu else _FUSIBLE
    returned = {kinds.owner(t).name for t in results}
    sources_of: dict[str, tuple[tf.Tensor, ...]] = {}
    depth: dict[str, int] = {}
    for op in operations:
        made_of = {s.name: s for t in op.inputs for s in sources_of.get(t.name, (t,))}
        sources = tuple(t for name, t in made_of.items() if bytes_of.get(name, 0))
        read = sum(bytes_of[t.name] for t in sources)
        deep = 1 + max((depth.get(t.name, 0) for t in op.inputs), default=0)
        for i, tensor in enumerate(op.outputs):
            shown = kinds.shown_input(op, i)
            readers = [reader for reader in order.readers(tensor) if reader in ours]
            times = len(readers)
            if shown is not None:
                fused = op.inputs[shown].name in sources_of
            else:
                fused = (
                    op.type in _FUSIBLE
                    and deep < _DEEPEST
                    and tensor.name not in returned
                    and all(reader.type in into for reader in readers)
                    and not any(map(kinds.is_gate, tensor.consumers()))  # a gate passes buffers
                    and (on_gpu or times < 2 or op.type not in _ONCE_ON_CPU)
                    and (times - 1) * read < (times + 1) * bytes_of.get(tensor.name, 0)
                )
            if fused:
                sources_of[tensor.name] = sources
                depth[tensor.name] = deep
    return sources_of
