"""All private TensorFlow names that the package uses.

All of them exist in TensorFlow 2.16 to 2.21. "2.0 on" after a name says since which version it has
existed. Nothing else in the package imports from `tensorflow.python` or `tensorflow.core`, or uses
an attribute that starts with an underscore.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2
from tensorflow.python.autograph.core import ag_ctx, config
from tensorflow.python.eager import backprop, context, record
from tensorflow.python.eager.polymorphic_function import atomic_function, autograph_util
from tensorflow.python.framework import (
    auto_control_deps,
    func_graph,
    function_def_to_graph,
    op_def_registry,
    ops,
    tensor_util,
    test_util,
)
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import item as grappler_item
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_util_v2,
    gradients,
    gradients_util,
    handle_data_util,
    resource_variable_ops,
)
from tensorflow.python.saved_model import save
from tensorflow.python.training import optimizer

# AutoGraph is not to convert this package. `do_not_convert` is not enough: a wrapper that is passed
# to `tf.function` as an argument is unwrapped. `autograph.core.config`: 2.0 on.
_OURS = config.DoNotConvert(__name__.partition(".")[0])
config.CONVERSION_RULES = (_OURS, *config.CONVERSION_RULES)


class Refusal(Exception):
    """A request of the user cannot be met. The error reaches the user with its own type.

    AutoGraph replaces unknown errors by another type, unless they have `ag_pass_through`
    (`autograph.impl.api`: 2.2 on); so does a Keras layer that is being called, unless they have
    `_keras_call_info_injected` (`traceback_utils`: Keras 2.7 on).
    """

    ag_pass_through = True
    _keras_call_info_injected = True


def onednn_enabled() -> bool:
    """Whether CPU kernels come from oneDNN (`TF_ENABLE_ONEDNN_OPTS`). `IsMklEnabled`: 1.x on."""
    return bool(test_util.IsMklEnabled())


_SEED = re.compile(r"(^|/)grad_ys_\d+|^(?!.*(_grad|gradient_tape)/)(.*/)?ones(_like)?(_\d+)?$")


def is_seed(op: tf.Operation) -> bool:
    """Whether `op` is an initial gradient, from which the backward pass starts.

    `gradients_util._DefaultGradYs` names these ops `<scope>/grad_ys_<i>`: 1.0 on. The tape names
    them `ones` and `ones_like`, outside the scopes of gradient functions: 2.0 on.
    """
    return _SEED.search(op.name) is not None


def in_xla(graph: tf.Graph) -> bool:
    """Whether `graph` is traced to be compiled as a whole (`jit_compile=True`).

    `control_flow_util.GraphOrParentsInXlaContext`: 2.0 on.
    """
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


#: The class of the objects that `tf.function` returns: 2.0 on.
FUNCTION: Any = type(tf.function(lambda: None))


def is_compiled_apart(function: Any) -> bool:
    """Whether a `tf.function` called now becomes an XLA program of its own.

    `Function._jit_compile`: 2.5 on.
    """
    in_graph = tf.compat.v1.get_default_graph()
    return bool(function._jit_compile) and not in_xla(in_graph)


def body(function: Any) -> Callable[..., Any]:
    """The Python function that a `tf.function` traces, converted by AutoGraph if that is enabled.

    `Function._autograph` and `ag_ctx.ControlStatusCtx`: 2.0 on.
    `autograph_util.py_func_from_autograph`: 2.12 on.
    """
    if not function._autograph:
        return tf.autograph.experimental.do_not_convert(function.python_function)

    def converted(*args: Any, **kwargs: Any) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):
            return autograph_util.py_func_from_autograph(function.python_function)(*args, **kwargs)

    return converted


def optimization_barrier(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` behind an XLA barrier. `gen_xla_ops.xla_optimization_barrier`: 2.9 on."""
    return gen_xla_ops.xla_optimization_barrier(input=[tensor])[0]


_PUBLIC = re.compile(r"tensorflow(\._api\.v2)?(\.compat\.v[12])*(\.autodiff)?")


def temporary_bytes(program: bytes) -> int:
    """The bytes of a compiled program's temporaries: no arguments, results or constants.

    Args:
        program: an `HloProto`, the stage "optimized_hlo_proto_serialized" of
            `experimental_get_compiler_ir`.
    """
    buffers = hlo_pb2.HloProto.FromString(program).buffer_assignment.buffer_allocations
    return sum(
        buffer.size
        for buffer in buffers
        if not (
            buffer.is_entry_computation_parameter
            or buffer.maybe_live_out
            or buffer.is_constant
            or buffer.is_thread_local
        )
    )


def unnamed(program: bytes) -> bytes:
    """An unoptimised XLA program without the number of the traced function in its names.

    Args:
        program: an `HloModuleProto`, the stage "hlo_serialized".
    """
    module = hlo_pb2.HloModuleProto.FromString(program)
    for computation in module.computations:
        if computation.name == module.entry_computation_name:
            computation.name = "step"
    module.name = module.entry_computation_name = "step"
    module.id = 0
    return bytes(module.SerializeToString(deterministic=True))


def for_stablehlo(program: bytes) -> bytes:
    """Makes an unoptimised XLA program convertible to StableHLO.

    StableHLO has no `copy`, so we replace it by a reshape to the same shape.

    Args:
        program: an `HloModuleProto`, the stage "hlo_serialized".
    """
    module = hlo_pb2.HloModuleProto.FromString(program)
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "copy":
                instruction.opcode = "reshape"
    return bytes(module.SerializeToString())


def captured(graph: tf.Graph) -> dict[str, tf.Tensor]:
    """The eager tensors that a function being traced has captured, by name of the placeholder.

    `FuncGraph.captures`, `ops.EagerTensor`: 2.0 on.
    """
    pairs = getattr(graph, "captures", ())
    return {inner.name: outer for outer, inner in pairs if isinstance(outer, ops.EagerTensor)}


def capture(tensor: tf.Tensor) -> tf.Tensor:
    """Captures an eager tensor in the function being traced. `FuncGraph.capture`: 2.0 on."""
    return tf.compat.v1.get_default_graph().capture(tensor)


def not_recorded() -> contextlib.AbstractContextManager[None]:
    """Within it, no tape records. `record.stop_recording`: 2.13 on."""
    return record.stop_recording()


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether a tape records ops that read `tensor`. `record.should_record_backprop`: 2.13 on."""
    return bool(record.should_record_backprop([tensor]))


def a_tape_records() -> bool:
    """Whether there is any tape. `record.could_possibly_record`: 2.13 on."""
    return bool(record.could_possibly_record())


def may_be_differentiated_again(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether tapes may also record the computation of gradients with respect to `tensors`.

    There are several tapes, or one that is persistent. `gradients_util.PossibleTapeGradientTypes`
    (0: no tape, 1: one): 2.1 on.
    """
    return gradients_util.PossibleTapeGradientTypes(tensors) > 1


def is_read(variable: tf.Variable) -> None:
    """Notes a read of a variable, so that tapes watch it. `variable_accessed`: 2.0 on."""
    resource_variable_ops.variable_accessed(variable)


@contextlib.contextmanager
def unoptimised() -> Iterator[None]:
    """Within it, functions that are called eagerly run without Grappler, as written.

    So they round as eager ops do. `Context.function_call_options`, `context.FunctionCallOptions`:
    2.0 on.
    """
    if not tf.executing_eagerly():
        yield
        return
    eager = context.context()
    before = eager.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    eager.function_call_options = context.FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        eager.function_call_options = before


def device() -> str:
    """The device that is set for eager ops. `Context.device_name`: 2.0 on."""
    return context.context().device_name or ""


def keras_mode() -> Any:
    """The `training` argument of the Keras layer that is being called.

    Keras 3: `global_state`'s "current_call_ctx"; `CallContext.training` to 3.11, `get_value` since.
    """
    state = sys.modules.get("keras.src.backend.common.global_state")
    calling = state and state.get_global_attribute("current_call_ctx")
    return getattr(calling, "training", None)


def keras_would_compile(model: Any) -> bool:
    """Whether Keras compiles the `fit` of a model on a GPU, if it may choose.

    Keras 3: `Layer._flatten_layers` and `supports_jit`; Keras 2 never does.
    """
    layers = model._flatten_layers()
    return all(getattr(layer, "supports_jit", False) for layer in layers)


#: `tf.compat.v1.gradients`, before anyone can replace it by ours. We do not read it from that
#: module, which would cache the attribute: `tf.__dict__["gradients"] = ...` would then do nothing.
#: `ops.gradients.gradients`: 1.0 on.
GRADIENTS = gradients.gradients


def gradient_functions() -> list[tuple[Any, str]]:
    """(module, name) of all functions by which TensorFlow and Keras compute or apply gradients.

    There can be several modules of `tf.compat.v1` (another one once `tf_keras` is imported): all
    that are loaded count. The optimizers of `tf.compat.v1` call `ops.gradients.gradients` and
    `eager.backprop.GradientTape`: 1.15 on. Their base class is `training.optimizer.Optimizer`: 1.0
    on.
    """
    public = [module for name, module in [*sys.modules.items()] if _PUBLIC.fullmatch(name)]
    functions = [(module, "gradients") for module in [*public, gradients]]
    functions += [(module, "GradientTape") for module in [*public, backprop]]
    functions.append((optimizer.Optimizer, "apply_gradients"))
    return [(module, name) for module, name in functions if hasattr(module, name)]


_defined: weakref.WeakKeyDictionary[tf.Graph, dict[str, Any]] = weakref.WeakKeyDictionary()


def function_graph(graph: tf.Graph, name: str) -> Any:
    """The `FuncGraph` of a function that an op of `graph` calls; None if unknown.

    `Graph._get_function`: 1.0 on. What that returns has the attribute `graph`: 2.12 on; a `Defun`
    has a `definition` instead: 1.0 on. `function_def_to_graph`: 1.14 on.
    """
    function = _called(name, graph)
    body = getattr(function, "graph", None)
    if body is not None or not hasattr(function, "definition"):
        return body
    known = _defined.setdefault(graph, {})
    if name not in known:
        with graph.as_default():
            known[name] = function_def_to_graph.function_def_to_graph(function.definition)
    return known[name]


def _called(name: str, within: Any) -> Any:
    """A function by name, of a graph or of a graph around it; None if there is none.

    `Graph._get_function`: 1.0 on.
    """
    function = None
    while function is None and within is not None:
        function = within._get_function(name)
        within = getattr(within, "outer_graph", None)
    return function


def copy_function(
    name: str, within: tf.Graph, new: str, graph: tf.Graph, edit: Callable[[Any], object]
) -> str:
    """Adds a copy of a function that an op of `within` calls to `graph`, its nodes edited.

    `Graph._get_function`, `_add_function`: 1.0 on. `atomic_function.AtomicFunction`, `Context.
    add_function_def`: 2.13 on.

    Returns:
        The name: `new`, or the old one if that is a function of v1, which is not copied.
    """
    function = _called(name, within)
    if not isinstance(function, atomic_function.AtomicFunction):
        return name
    definition = type(function.definition).FromString(function.definition.SerializeToString())
    edit(definition.node_def)
    definition.signature.name = new
    eager = context.context()
    eager.add_function_def(definition)
    known = [*graph._functions.values()]  # among them what it calls
    graph._add_function(atomic_function.AtomicFunction(new, eager, function.function_type, known))
    return new


def share_functions(graph: tf.Graph, other: tf.Graph) -> None:
    """Adds the functions of `graph` to another graph, which also keeps them alive.

    `Graph._functions`: 1.0 on. `Graph._add_function_recursive`: 2.12 on.
    """
    for function in [*graph._functions.values()]:
        other._add_function_recursive(function)


def share_gradient(op: tf.Operation, copy: tf.Operation) -> None:
    """Gives the copy of a call the call's gradient function. `_gradient_function`: 2.16 on."""
    copy._gradient_function = op._gradient_function


def constant(tensor: tf.Tensor) -> Any:
    """The value of a graph tensor if known shapes and constants determine it, else None.

    `tensor_util.try_evaluate_constant`: 2.12 on (1.13 on as a part of `smart_cond`).
    """
    return tensor_util.try_evaluate_constant(tensor)


def is_registered(op_type: str) -> bool:
    """Whether TensorFlow has an op of that type; else the type is the name of a function.

    `op_def_registry.get`: 2.0 on.
    """
    return op_def_registry.get(op_type) is not None


def new_function_graph(name: str) -> Any:
    """An empty graph of a function, within the default graph. `func_graph.FuncGraph`: 1.13 on."""
    return func_graph.FuncGraph(name)


def function_of(body: Any, graph: tf.Graph) -> str:
    """Adds a function to `graph`; returns its name. `create_new_tf_function`: 1.14 on."""
    with graph.as_default():
        return control_flow_util_v2.create_new_tf_function(body)


def in_control_flow(op: tf.Operation) -> bool:
    """Whether `op` lies in a v1 `while_loop` or `cond`. `_get_control_flow_context`: 1.0 on."""
    context = op._get_control_flow_context()
    return context is not None and not context.IsXLAContext()


def made_by_differentiation(op: tf.Operation) -> bool:
    """Whether a v1 graph got `op` from `tf.gradients`. `Operation._original_op`: 1.0 on."""
    return op._original_op is not None


def is_reference(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is a v1 reference variable. `DType._is_ref_dtype`: 1.0 on."""
    return tensor.dtype._is_ref_dtype


def has_references(graph: tf.Graph) -> bool:
    """Whether `graph` has v1 reference variables. `DType._is_ref_dtype`: 1.0 on."""
    return any(is_reference(t) for op in graph.get_operations() for t in op.outputs)


_ends: weakref.WeakKeyDictionary[tf.Graph, tuple[Callable[[list], object], list]]
_ends = weakref.WeakKeyDictionary()  # by graph being traced: the function to call, and its items


def at_end_of_trace(graph: tf.Graph, finish: Callable[[list], object], item: Any) -> bool:
    """Registers an item; `finish` is called with all items when the trace of `graph` ends.

    By then TensorFlow has added its automatic control dependencies, so all edges are there. If the
    trace fails, the items are dropped. `Graph.experimental_acd_manager`: 2.6 on.

    Args:
        graph: a graph.
        finish: the same function for every item.
        item: the item to add to its list.

    Returns:
        False, and nothing is registered, if no function is being traced in `graph`.
    """
    if getattr(graph, "experimental_acd_manager", None) is None:
        return False
    _ends.setdefault(graph, (finish, []))[1].append(item)
    return True


_returned: weakref.WeakKeyDictionary[tf.Graph, frozenset[str]] = weakref.WeakKeyDictionary()


def returned(graph: tf.Graph) -> frozenset[str]:
    """The names of the tensors that the function in `graph` returns; known as its trace ends.

    `AutomaticControlDependencies._returned_tensors`: 2.0 on.
    """
    return _returned.get(graph, frozenset())


_automatic_control_dependencies = auto_control_deps.AutomaticControlDependencies.__exit__


@functools.wraps(_automatic_control_dependencies)
def _end_trace(manager: Any, *exception: Any) -> None:
    graph = getattr(manager, "_graph", None)  # eagerly there is none
    finish, items = _ends.pop(graph, (list, [])) if graph is not None else (list, [])
    if items:
        returned = tf.nest.flatten([*manager._returned_tensors], expand_composites=True)
        _returned[graph] = frozenset(tensor.name for tensor in returned)
    _automatic_control_dependencies(manager, *exception)
    if not any(exception):
        finish(items)


# A `with` statement looks up `__exit__` as it begins, so we patch it before any trace.
auto_control_deps.AutomaticControlDependencies.__exit__ = _end_trace


def save_without(gradient: str) -> None:
    """Makes `tf.saved_model.save` skip a registered gradient, which has no graph to save.

    Ops of the loaded model still name it. `saved_model.save._iterate_op_types`: 2.7 on.

    Args:
        gradient: the name under which it is registered.
    """
    of_function = save._iterate_op_types

    @functools.wraps(of_function)
    def but_that_one(function: Any) -> Iterator[tuple[Any, tf.Operation]]:
        for name, op in of_function(function):
            if tf.compat.as_str(name) != gradient:
                yield name, op

    save._iterate_op_types = but_that_one


_undo = threading.local()  # `edits`: functions that undo the edits of this thread, newest last

#: The functions that undo edits of a graph, newest last.
Edits: TypeAlias = list[Callable[[], object]]


def take_back(edits: Edits) -> None:
    """Undoes edits, the newest first; none are left. What this changes is not registered."""
    registered, _undo.edits = getattr(_undo, "edits", None), None
    try:
        while edits:
            edits.pop()()
    finally:
        _undo.edits = registered


@contextlib.contextmanager
def all_or_nothing() -> Iterator[Edits]:
    """Within it, an error undoes all edits of ops that were made by the functions below.

    TensorFlow cannot remove ops that were added, but nothing reads them. Yields the list of
    functions that undo the edits, to be called newest first.
    """
    around = getattr(_undo, "edits", None)
    edits: Edits = []
    _undo.edits = edits
    try:
        yield edits
        if around is not None:
            around.extend(edits)
    except BaseException:
        take_back(edits)
        raise
    finally:
        _undo.edits = around


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Like `all_or_nothing`, but at its end all edits are undone."""
    with all_or_nothing() as edits:
        yield
        take_back(edits)


def can_be_undone(take_back: Callable[[], object]) -> None:
    """Registers `take_back`, which an error within `all_or_nothing` calls."""
    if getattr(_undo, "edits", None) is not None:
        _undo.edits.append(take_back)


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Makes `tensor` the input `index` of `op`. `Operation._update_input`: 1.0 on."""
    can_be_undone(functools.partial(op._update_input, index, op.inputs[index]))
    op._update_input(index, tensor)


def may_update_input(op: tf.Operation, index: int) -> bool:
    """Whether `update_input` can change an input: not if it was added to a loop later.

    `Operation._update_input`: 1.0 on.
    """
    try:
        op._update_input(index, op.inputs[index])
    except tf.errors.OutOfRangeError:
        return False
    return True


def reroute(tensor: tf.Tensor, other: tf.Tensor, but: Container[tf.Operation] = ()) -> None:
    """Makes the readers of a tensor, but for some and the op that makes `other`, read `other`."""
    for reader in tensor.consumers():
        if reader is other.op or reader in but:
            continue
        for i, read in enumerate(reader.inputs):
            if read is tensor:
                update_input(reader, i, other)


def add_control_inputs(op: tf.Operation, before: Iterable[tf.Operation]) -> None:
    """Makes `op` wait for the ops `before`.

    `Operation._add_control_inputs` and `_remove_all_control_inputs`: 1.0 on.
    """
    can_be_undone(functools.partial(op._add_control_inputs, op.control_inputs))
    can_be_undone(op._remove_all_control_inputs)
    op._add_control_inputs(list(before))


def colocation(op: tf.Operation) -> list[bytes]:
    """The groups that `op` is explicitly colocated with. The attribute `_class`: 1.0 on."""
    try:
        return op.get_attr("_class")
    except ValueError:
        return []


def set_colocation(op: tf.Operation, groups: Sequence[bytes]) -> None:
    """Colocates `op` with the named groups. `Operation._set_attr`: 1.0 on."""
    value = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(s=groups))
    op._set_attr("_class", value)


def set_device(op: tf.Operation, device: str) -> None:
    """Places `op`. `Operation._set_device_from_string`: 1.13 on."""
    op._set_device_from_string(device)


#: Attributes that tell Grappler's arithmetic optimiser not to merge an op with others into one sum
#: or product: 1.5 on.
UNMERGED = (
    "_grappler_ArithmeticOptimizer_AddOpsRewriteStage",
    "_grappler_ArithmeticOptimizer_MinimizeBroadcasts",
)


def set_unmerged(op: tf.Operation) -> None:
    """Keeps Grappler from merging `op` with its reader.

    `Operation._set_attr` and `_clear_attr`: 1.0 on.
    """
    for name in UNMERGED:
        if name not in op.node_def.attr:
            can_be_undone(functools.partial(op._clear_attr, name))
        op._set_attr(name, attr_value_pb2.AttrValue(b=True))


def is_unmerged(op: tf.Operation) -> bool:
    """Whether `set_unmerged` was called for `op`."""
    return UNMERGED[0] in op.node_def.attr


def traces(function: Any) -> list[Any]:
    """The concrete functions of a `tf.function` that have been traced so far.

    `Function._function_cache`: 2.13 on.
    """
    return list(function._function_cache.values())


def local_devices() -> list[dict]:
    """The properties of this machine's devices. `Cluster.ListDevices`: 1.5 on."""
    devices = grappler_cluster.Cluster(allow_soft_placement=True).ListDevices()
    return [
        {
            field.name: dict(value) if field.name == "environment" else value
            for field, value in device.properties.ListFields()
        }
        for device in devices
    ]


class Estimator:
    """Grappler's cost estimates for the ops of a graph; nothing runs.

    `grappler.item.Item` and `grappler.cluster.Cluster`, 1.5 on.

    Args:
        graph_def: the graph.
        fetches: names of the nodes that a step fetches.
        device: properties of the device to estimate for (`DeviceProperties` fields).
    """

    def __init__(
        self,
        graph_def: tf.compat.v1.GraphDef,
        fetches: Sequence[str],
        device: dict[str, Any],
    ) -> None:
        meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
        meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
        self._item = grappler_item.Item(meta_graph)
        self._device = device_properties_pb2.NamedDevice(
            name=f"/job:localhost/replica:0/task:0/device:{device['type']}:0",
            # Nothing is allocated, so no graph is too large.
            properties=device_properties_pb2.DeviceProperties(**device | {"memory_size": 2**62}),
        )

    def seconds(self) -> dict[str, float]:
        """The estimated seconds of one run of every node that the fetches need."""
        cluster = grappler_cluster.Cluster(devices=[self._device])
        costs, _, _ = cluster.MeasureCosts(self._item)
        # Times are in whole nanoseconds: on a fast device a small op would count 0.
        return {cost.node: max(cost.compute_cost, 1) * 1e-9 for cost in costs}


def optimized(
    graph_def: tf.compat.v1.GraphDef, fetches: Sequence[str], whole: bool = True
) -> tf.compat.v1.GraphDef:
    """The graph as Grappler optimises it in a session with default options; nothing runs.

    `tf_optimizer.OptimizeGraph`: 1.5 on.

    Args:
        graph_def: the graph.
        fetches: names of the tensors that a step fetches.
        whole: False for one pass of the optimisers that merge, reorder and drop ops, in a third of
            the time: ops are not fused, and keep their layouts.
    """
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
    config = tf.compat.v1.ConfigProto()
    if not whole:
        rewriter = config.graph_options.rewrite_options
        rewriter.meta_optimizer_iterations = rewriter.ONE
        rewriter.memory_optimization = rewriter.NO_MEM_OPT
        for name in _NOT_REORDERING:
            setattr(rewriter, name, rewriter.OFF)
    return tf_optimizer.OptimizeGraph(config, meta_graph)


# Fields of `RewriterConfig`: the optimisers that neither merge nor reorder ops.
_NOT_REORDERING = (
    "function_optimization",
    "implementation_selector",
    "layout_optimizer",
    "loop_optimization",
    "remapping",
    "shape_optimization",
)


def read_only_inputs(op: tf.Operation) -> frozenset[int]:
    """The inputs of a loop, branch or call that are variables it only reads, by index.

    The attribute `_read_only_resource_inputs`: 2.1 on.
    """
    attribute = op.node_def.attr.get("_read_only_resource_inputs")
    return frozenset() if attribute is None else frozenset(attribute.list.i)


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Variables that are made within are not made by the functions that are being traced.

    `init_scope` leaves the traces, but the default graph stays the innermost one, and tells
    functions of the variables that are made: so that is a new one, which does not.
    `Graph._variable_creator_stack`: 1.13 on; `variable_capturing_scope`: 2.1 on.
    """
    apart = new_function_graph("outside")
    with apart.as_default(), tf.init_scope():
        apart._variable_creator_stack = [
            (priority, creator)
            for priority, creator in apart._variable_creator_stack
            if getattr(creator, "__name__", "") != "variable_capturing_scope"
        ]
        yield


def copy_handle_data(tensor: tf.Tensor, to: tf.Tensor) -> None:
    """Copies the static description of what a handle holds. `copy_handle_data`: 2.2 on."""
    handle_data_util.copy_handle_data(tensor, to)


def shape_and_dtype_of_variable(handle: tf.Tensor) -> tuple[list[int], tf.DType] | None:
    """Shape and dtype of the variable of a handle; None if it is no variable, or unknown.

    `handle_data_util.get_resource_handle_data`: 2.2 on.
    """
    handle_data = handle_data_util.get_resource_handle_data(handle).shape_and_type
    shape = tf.TensorShape(handle_data[0].shape) if handle_data else tf.TensorShape(None)
    return (
        (shape.as_list(), tf.as_dtype(handle_data[0].dtype)) if shape.is_fully_defined() else None
    )


def change_loop(
    op: tf.Operation, condition: Any, body: Any, more: Sequence[tf.Tensor], parallel: int
) -> list[tf.Tensor]:
    """Gives a loop other functions and more loop variables; returns the outputs for those.

    `while_v2._WhileGrad` does the same. `Operation._set_func_attr`, `_set_type_list_attr`,
    `_set_shape_list_attr`, `_add_while_inputs`, `_add_outputs`: 1.13 on. The attribute
    `_num_original_outputs`: 2.0 on; `_cond_graph`, `_body_graph`: 2.1 on.

    Args:
        op: a `While`, in a graph.
        condition: the function of its condition, a `FuncGraph`.
        body: the function of a round, a `FuncGraph`.
        more: the initial values of the new loop variables.
        parallel: how many rounds may run in parallel.
    """
    shapes = [tf.TensorShape(shape) for shape in op.get_attr("output_shapes")]
    before = len(op.outputs)
    op._set_func_attr("cond", function_of(condition, op.graph))
    op._set_func_attr("body", function_of(body, op.graph))
    if more:
        op._set_type_list_attr("T", [t.dtype.as_datatype_enum for t in body.outputs])
        op._set_shape_list_attr("output_shapes", [*shapes, *(t.shape for t in more)])
        op._add_while_inputs(list(more))
        op._add_outputs([t.dtype for t in more], [t.shape for t in more])
    for source, tensor in zip(more, op.outputs[before:], strict=True):
        copy_handle_data(source, tensor)
    op._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=parallel))
    op._set_attr("_num_original_outputs", attr_value_pb2.AttrValue(i=len(op.outputs)))
    op._cond_graph, op._body_graph = condition, body
    return list(op.outputs[before:])


def copy_attributes(op: tf.Operation, to: tf.Operation, names: Iterable[str]) -> None:
    """Copies attributes, where they are set, to another op. `Operation._set_attr`: 1.0 on."""
    for name in names:
        if name in op.node_def.attr:
            to._set_attr(name, op.node_def.attr[name])


def set_number(op: tf.Operation, name: str, value: int) -> None:
    """Sets an integer attribute. `Operation._set_attr` and `_clear_attr`: 1.0 on."""
    if name not in op.node_def.attr:
        can_be_undone(functools.partial(op._clear_attr, name))
    op._set_attr(name, attr_value_pb2.AttrValue(i=value))
