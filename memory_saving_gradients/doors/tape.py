"""`GradientTape`: `tf.GradientTape`, with activations recomputed instead of kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Unpack

import tensorflow as tf

from memory_saving_gradients.console.warning import warn
from memory_saving_gradients.graph.inline import inlined_calls
from memory_saving_gradients.options.checkpoints_argument import Checkpoints
from memory_saving_gradients.options.options import MoreOptions, Options
from memory_saving_gradients.pipeline.save import differentiate
from memory_saving_gradients.plans.plan import Plan

_EAGER = (
    "memory_saving_gradients: this step runs eagerly, so there is no graph to rewrite: gradients "
    "are right, but no memory is saved. Wrap the step in a tf.function (in Keras: leave out "
    "run_eagerly=True), or call its parts with memory_saving_gradients.checkpoint. This warning is "
    "shown once."
)


class GradientTape(tf.GradientTape):
    """A `tf.GradientTape` whose `gradient()` saves memory inside a `tf.function`.

    TensorFlow's own tape differentiates; then its backward ops are rewritten to read recomputed
    activations. So the values are those of the plain tape, bit for bit where the kernels are
    deterministic, and so is its behaviour. `jacobian` and `batch_jacobian` are those of the plain
    tape. In eager mode gradients are plain, and a warning says so once. A `tf.function` that is
    called under the tape is inlined into the graph, so it is planned, too.

    Args:
        persistent: as in `tf.GradientTape`.
        watch_accessed_variables: as in `tf.GradientTape`.
        checkpoints: which forward tensors to keep, as in `gradients`.
        memory_budget: the peak to stay within, as in `gradients`.
        **more: max_overhead, max_recompute, plan, plan_cache, device, cost_model, batch_size,
            verify, running_sums and pieces, as in `gradients`.

    Raises:
        TypeError: `persistent` is a string, or an option is of a wrong type.
        ValueError: the strategy is unknown or the budget is not positive.

    Example:
        >>> w = tf.Variable(tf.eye(64))
        >>> @tf.function
        ... def step(x):
        ...     with GradientTape() as tape:
        ...         loss = tf.reduce_sum(tf.tanh(tf.tanh(tf.tanh(x @ w))))
        ...     return tape.gradient(loss, w)
        >>> step(tf.ones((512, 64))).shape
        TensorShape([64, 64])
    """

    @tf.autograph.experimental.do_not_convert
    def __init__(
        self,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        *,
        checkpoints: Checkpoints = "memory",
        memory_budget: int | str | float | None = None,
        **more: Unpack[MoreOptions],
    ) -> None:
        if isinstance(persistent, str):
            raise TypeError(
                f"persistent must be a bool, got {persistent!r}: did you mean "
                f"GradientTape(checkpoints={persistent!r})?"
            )
        super().__init__(persistent, watch_accessed_variables)
        self._options: Options | None = Options.beside_memory(checkpoints, memory_budget, **more)
        self._inlined = contextlib.ExitStack()

    @tf.autograph.experimental.do_not_convert
    def __enter__(self) -> GradientTape:
        if self._options is not None and not tf.executing_eagerly():
            self._inlined.enter_context(inlined_calls())
        super().__enter__()
        return self

    @tf.autograph.experimental.do_not_convert
    def __exit__(self, *exception: Any) -> None:
        self._inlined.close()
        super().__exit__(*exception)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """`tf.GradientTape.gradient`, in less memory.

        Args:
            target: as in `tf.GradientTape.gradient`.
            sources: as in `tf.GradientTape.gradient`.
            output_gradients: as in `tf.GradientTape.gradient`.
            unconnected_gradients: as in `tf.GradientTape.gradient`.

        Returns:
            The gradients, in the structure of `sources`.

        Raises:
            BudgetError: no plan within `memory_budget` was found.
            ValueError: a checkpoint is not in the forward graph.
        """
        options = self._options
        plain = super().gradient
        if options is not None and tf.executing_eagerly():
            _warn_of_eager_mode()
            options = None
        if options is None:
            return plain(target, sources, output_gradients, unconnected_gradients)
        if output_gradients is not None:
            output_gradients = tf.nest.map_structure(_seed, output_gradients)
        return differentiate(
            lambda: plain(target, sources, output_gradients, unconnected_gradients),
            target,
            sources,
            tf.compat.v1.get_default_graph(),
            options,
            self._planned,
        )

    @tf.autograph.experimental.do_not_convert
    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """`tf.GradientTape.jacobian`, unchanged: TensorFlow vectorises its loop over targets."""
        with self._plain():
            return super().jacobian(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """`tf.GradientTape.batch_jacobian`, unchanged."""
        with self._plain():
            return super().batch_jacobian(*args, **kwargs)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        options, self._options = self._options, None
        try:
            yield
        finally:
            self._options = options

    def _planned(self, plan: Plan) -> None:
        """Called with each plan that was applied."""


def _seed(gradient: Any) -> Any:
    """An identity of `gradient`, whose name marks the start of the backward pass."""
    return None if gradient is None else tf.identity(gradient, name="grad_ys_0")


def _warn_of_eager_mode() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn(_EAGER)


_warned = False
