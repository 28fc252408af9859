"""`checkpoint()`: keep the inputs of a part of a network, run the part again for its gradients."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memory_saving_gradients.by_hand.signatures import Cache, Called, flattened, packed
from memory_saving_gradients.by_hand.split import Policy, Split, Traced, is_differentiable, split
from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph import calls, gate, kinds, tf_private
from memory_saving_gradients.graph.devices import described
from memory_saving_gradients.graph.inline import inlined_calls
from memory_saving_gradients.pipeline.save import STRICT
from memory_saving_gradients.runtimes.xla import Xla


@tf.autograph.experimental.do_not_convert
def checkpoint(
    function: Callable | None = None,
    *args: Any,
    policy: str | Policy | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a part of a network so that only its inputs are kept; its gradients run it again.

    Use it in eager mode and in graphs, under any tape or `tf.gradients`. The part is traced once
    for each signature, as by a `tf.function`: side effects of Python happen once. Ops that must not
    run twice do not: for random numbers the smallest tensor that determines the result is kept (for
    dropout its mask), updates of variables happen only in the forward pass, and values of variables
    are kept as they were read. In eager mode without a tape, the part is called normally.

    Args:
        function: the part: a function, method, Keras layer or `tf.Module`. With nothing else,
            `checkpoint(function)` returns the part wrapped, so it serves as a decorator.
        *args: its arguments: tensors in any nest, and anything else.
        policy: what to keep besides the inputs: `"speed"` (outputs of matrix products, convolutions
            and the like, so that only cheap ops run again), or a function from a `tf.Operation` to
            bool that tells whether its outputs are kept. None keeps nothing else.
        **kwargs: its keyword arguments.

    Returns:
        The result of the part.

    Raises:
        TypeError: `function` or `policy` is of a wrong type, or an argument is a symbolic Keras
            tensor, which `memory_saving_gradients.keras.Checkpoint` is for.
        ValueError: the policy is unknown.

    Example:
        >>> w = tf.Variable(tf.eye(64))
        >>> def block(x):
        ...     return tf.tanh(tf.tanh(x @ w))
        >>> x = tf.ones((512, 64))
        >>> with tf.GradientTape() as tape:
        ...     y = checkpoint(block, checkpoint(block, x))
        >>> tape.gradient(y, w).shape
        TensorShape([64, 64])

    The interface is that of `torch.utils.checkpoint.checkpoint`; the policies are those of JAX
    (`jax.checkpoint`) and of PyTorch's selective checkpointing.
    """
    keep = _policy(policy)
    if function is None:
        return functools.partial(checkpoint, policy=policy)
    if not callable(function):
        raise TypeError(
            f"checkpoint needs a function, method or layer, got {function!r} of type "
            f"{type(function).__name__}: checkpoint(block, x), and not checkpoint(block(x))"
        )
    if not args and not kwargs:
        return _wrapped(function, policy)
    _refuse_options_of_pytorch(function, kwargs)
    called = Called.of(function, args, kwargs)
    _check(called)
    eager = tf.executing_eagerly()
    if eager and not tf_private.a_tape_records():
        return function(*args, **kwargs)
    # A part that is traced in a graph belongs to that graph.
    part = _parts.get(called, keep, _Part) if eager else _Part(called, keep)
    if eager and part.serves_one_call:
        part = _Part(called, keep)
    return part(called, eager)


# The keywords of `torch.utils.checkpoint.checkpoint`.
_PYTORCH = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "context_fn")


def _refuse_options_of_pytorch(function: Callable, kwargs: dict[str, Any]) -> None:
    """Raises if a keyword is one of PyTorch's options, and the part has no such argument."""
    foreign = dict.fromkeys(name for name in _PYTORCH if name in kwargs)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # its signature is unknown
        return
    try:
        signature.bind_partial(**foreign)
    except TypeError:
        raise TypeError(
            f"checkpoint has no option {next(iter(foreign))!r}, and hands keywords to the part, "
            "which has none of that name: leave it out. Random numbers are kept as they were "
            "drawn, and nothing is re-entered; context_fn is policy= here."
        ) from None


def _wrapped(function: Callable, policy: str | Policy | None) -> Callable:
    @tf.autograph.experimental.do_not_convert
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            raise TypeError("a part needs an argument: without inputs, there is nothing to keep")
        return checkpoint(function, *args, policy=policy, **kwargs)

    return functools.update_wrapper(call, function)


def _policy(policy: Any) -> Policy:
    if policy is None:
        return _nothing
    if policy == "speed":
        return _expensive
    if isinstance(policy, str):
        raise ValueError(f'unknown policy "{policy}": it must be "speed", a function, or None')
    if not callable(policy):
        raise TypeError(
            f'policy must be "speed", a function from a tf.Operation to bool, or None, got '
            f"{policy!r} of type {type(policy).__name__}"
        )
    return policy


def _nothing(op: tf.Operation) -> bool:
    return False


def _expensive(op: tf.Operation) -> bool:
    return op.type in kinds.EXPENSIVE


def _check(called: Called) -> None:
    for leaf in called.leaves:
        if type(leaf).__name__ == "KerasTensor":
            raise TypeError(
                f"{leaf!r} is a symbolic tensor of a Keras model that is being built: wrap the "
                "layer, memory_saving_gradients.keras.Checkpoint(layer)(x), instead"
            )


class _Part:
    """A part, traced for one signature.

    Attributes:
        serves_one_call: whether it can be called only once, as its gradient reads values that
            Python keeps of the last call.
    """

    def __init__(self, called: Called, keep: Policy) -> None:
        self._keep = keep
        self._result: Any = None
        self._name = called.name
        self._splits: dict[tuple, Split | None] = {}

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            self._result = _as_it_is(called, tensors)
            return [t for t in flattened(self._result) if tf.is_tensor(t)]

        with inlined_calls():
            try:
                traced = tf.function(run, autograph=False).get_concrete_function(*called.tensors)
            except Exception as error:
                error.add_note(
                    f"memory_saving_gradients.checkpoint traces {called.name} as a tf.function "
                    "would: what needs values of tensors in Python (.numpy(), lists of them) "
                    "cannot be traced. Leave it out of the part."
                )
                raise
        self.serves_one_call = calls.serves_one_call(traced.graph)
        self._in_a_loop = calls.keeps_the_last_round(traced.graph)
        self._body = traced.graph
        self._traced = Traced.of(traced.graph)
        self._captured = [*traced.captured_inputs]
        self._variables = [*traced.graph.variables]

    def __call__(self, called: Called, eager: bool) -> Any:
        inputs = [*called.tensors, *self._captured]
        for variable in self._variables:
            tf_private.is_read(variable)
        by = tuple(
            i
            for i, t in enumerate(inputs)
            if (is_differentiable(t) or t.dtype == tf.resource)
            and (not eager or tf_private.is_recorded(t))
        )
        count = len(self._body.outputs)
        if not by or not any(map(is_differentiable, self._body.outputs)):
            return _as_it_is(called)
        if eager and self._in_a_loop:
            warn(
                f"memory_saving_gradients: {self._name} has a tf.py_function in a loop or branch, "
                "which a traced part could not differentiate, so checkpoint() calls it as it is: "
                "its gradients are right and no memory is saved. Leave the loop out of the part."
            )
            return _as_it_is(called)
        parts = self._split(inputs, by, tf_private.may_be_differentiated_again(inputs))
        if parts is None:
            return _as_it_is(called)
        return self._packed(_differentiable(parts, count, inputs))

    def _split(self, inputs: Sequence[tf.Tensor], by: tuple[int, ...], again: bool) -> Split | None:
        """The part, split for the gradients of some inputs; None, with a warning, if that fails."""
        if (by, again) not in self._splits:
            found = None
            try:
                found = split(self._traced, inputs, by, self._keep, again)
            except Exception as error:
                if os.environ.get(STRICT):
                    raise
                warn(
                    f"memory_saving_gradients: {type(error).__name__}: {error}. checkpoint() "
                    f"cannot take {self._name} apart, so it is called as it is: its gradients are "
                    "right and no memory is saved. Please report it to the authors, with the part "
                    f"if you can; {STRICT}=1 in the environment raises the error instead."
                )
            if found is not None and not found.saves:
                found = None
                warn(
                    f"memory_saving_gradients: checkpoint() saves nothing of {self._name}, so it "
                    "is called as it is: what its gradients need is its inputs, or must not be "
                    "computed again (random numbers, state), or the policy keeps it. Put more "
                    "layers into the part, or leave checkpoint() out."
                )
            self._splits[by, again] = found
        return self._splits[by, again]

    def _packed(self, results: Sequence[tf.Tensor]) -> Any:
        made = iter(results)
        leaves = [next(made) if tf.is_tensor(t) else t for t in flattened(self._result)]
        return packed(self._result, leaves)


def _as_it_is(called: Called, tensors: Sequence[tf.Tensor] | None = None) -> Any:
    """The results of the part, with the values of variables."""
    return tf.nest.map_structure(_value, called.run(called.tensors if tensors is None else tensors))


def _value(result: Any) -> Any:
    return result.read_value() if isinstance(result, tf.Variable) else result


def _differentiable(parts: Split, count: int, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The `count` results of the forward function, differentiated by the backward function."""
    seen: list[tf.Tensor] = []  # as tapes know it
    outer = inputs

    @tf.custom_gradient
    def run(*inputs: tf.Tensor) -> Any:
        with tf_private.not_recorded(), tf_private.unoptimised():
            made = parts.forward(*inputs)
        results, kept = made[:count], made[count:]
        outputs = [*results, *(kept[i] for i in parts.seen)]

        def gradient(*grads: tf.Tensor | None, variables: Any = None) -> Any:
            for i, tensor in zip(parts.seen, seen, strict=True):
                kept[i] = tensor
            given = [
                tf.zeros_like(t) if grad is None else tf.convert_to_tensor(grad)
                for t, grad in zip(outputs, grads, strict=True)
                if is_differentiable(t)
            ]
            # SavedModel cannot save a gradient that reads a resource passed as an argument.
            known = [o if o.dtype == tf.resource else t for o, t in zip(outer, inputs, strict=True)]
            again, given = _held_back([*known, *kept], parts.held, given)
            with tf_private.unoptimised():
                found = parts.backward(*again, *given)
            return found if variables is None else (found, [None] * len(variables))

        return outputs, gradient

    outputs = run(*inputs)
    seen += outputs[count:]
    return outputs[:count]


def _held_back(
    tensors: list[tf.Tensor], held: Sequence[int], grads: list[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Both; in a graph for XLA, the tensors `held` wait for the gradients."""
    if held and not tf.executing_eagerly() and tf_private.in_xla(tensors[held[0]].graph):
        on_gpu = Xla(described("cpu")).on_gpu  # no GPU is described, so a present one counts
        passed, grads = gate.passed([tensors[i] for i in held], grads, barrier=on_gpu)
        for i, later in zip(held, passed, strict=True):
            tensors[i] = later
    return tensors, grads


_parts = Cache()
