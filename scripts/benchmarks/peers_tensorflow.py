"""The ways to recompute on TensorFlow, each as its own authors mean it to be used.

In sessions: `tf.gradients`; Grappler's own RECOMPUTATION_HEURISTICS; √n articulation points, the
method of OpenAI's gradient-checkpointing (by our rewriter, as that package runs on no TensorFlow
2); and ours. Their peaks are sums of TensorFlow's allocation records.

In a `tf.function`: plain; `tf.recompute_grad` around the network's natural blocks, with Grappler
and without (in a graph of v1 nothing holds back what it recomputes); and ours. There peaks are
measured in fresh processes. `RematScope` is Keras's, so it trains a network of the same kind in
`fit`, beside plain `fit`.

Gradients are checked by central differences of the loss along them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from memory_saving_gradients import Plan, get_plans, gradients, gradients_memory, measure
from memory_saving_gradients._quiet import silenced
from memory_saving_gradients.planning.articulation import sqrt_spaced
from scripts.benchmarks import keras_fit
from scripts.benchmarks.common import one_line, timed
from scripts.benchmarks.models import MODELS
from test_models import GPT, Model, build_v1

v1 = tf.compat.v1
PLAIN = "tf.gradients"
FUNCTION = "tf.gradients in a tf.function"

#: label: (builder, batch), and the model of Keras that stands for it with `RematScope`.
COMPARED: dict[str, tuple[tuple[Callable[[], Model], int], str | None]] = {
    "ResNet-56, CIFAR, batch 128": (
        MODELS["ResNet-56, CIFAR, batch 128"],
        "ResNet-50, 96 px, batch 32",
    ),
    "GPT, 6 layers, batch 8": (MODELS["GPT, 6 layers, batch 8"], "Transformer, 8 blocks, batch 32"),
    "GPT with dropout, batch 8": ((functools.partial(GPT, dropout=0.1), 8), None),
    "U-Net, 128 px, batch 4": (MODELS["U-Net, 128 px, batch 4"], "U-Net, 128 px, batch 8"),
}

# Gradients are right if the loss changes along them by what they say, but for so much.
_TOLERANCE = 0.01
# How far to go along them: so much of the loss. Of a smaller norm nothing can be told.
_STRETCH = 1e-3
_ZERO = 1e-12


@dataclasses.dataclass
class Row:
    """What a way to recompute takes on a model.

    Attributes:
        peer: the way.
        plain: the way that its ratios are to.
        peak_bytes: measured peak of a step; None if it failed.
        time_ratio: time of a step against `plain`, the median; None where it was not measured.
        gradient_error: how far the change of the loss along the gradient is from what the gradient
            says, as a fraction; None where it was not checked.
        error: what a user sees where it fails.
    """

    peer: str
    plain: str
    peak_bytes: int | None = None
    time_ratio: float | None = None
    gradient_error: float | None = None
    error: str | None = None


def verdict(row: Row) -> str:
    """What is known of the gradients."""
    if row.gradient_error is None:
        return "not checked"
    if row.gradient_error <= _TOLERANCE:
        return "right"
    return f"wrong, by {row.gradient_error:.0%}"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A way to recompute in a session.

    Attributes:
        differentiate: called with the model's builder, its batch, the loss and the variables.
        rewriting: options of Grappler.
    """

    differentiate: Callable[..., list]
    rewriting: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _plainly(make: Callable[[], Model], batch: int, loss: tf.Tensor, variables: list) -> list:
    return tf.gradients(loss, variables)


def _ours(**options: Any) -> Callable[..., list]:
    def differentiate(
        make: Callable[[], Model], batch: int, loss: tf.Tensor, variables: list
    ) -> list:
        return gradients(loss, variables, **options)

    return differentiate


def _sqrt_points(make: Callable[[], Model], batch: int, loss: tf.Tensor, variables: list) -> list:
    """Keeps every √n-th articulation point."""
    with tf.Graph().as_default() as twin:
        v1.set_random_seed(7)
        step = build_v1(make(), batch)
        gradients(step.loss, step.variables, memory_budget=1.0)
        problem = get_plans(twin)[-1].problem
    plan = Plan.of("√n", problem, sqrt_spaced(problem))
    if plan.peak_bytes >= plan.baseline_peak_bytes:
        raise RuntimeError("saves nothing")
    return gradients(loss, variables, plan=plan)


PEERS = {
    PLAIN: Peer(_plainly),
    "Grappler heuristics": Peer(
        _plainly,
        rewriting={"memory_optimization": RewriterConfig.RECOMPUTATION_HEURISTICS},
    ),
    "√n articulation points": Peer(_sqrt_points),
    "ours, speed": Peer(_ours(checkpoints="speed")),
    "ours, memory": Peer(_ours(checkpoints="memory")),
    "ours, budget 0.3": Peer(_ours(memory_budget=0.3)),
}


class Built:
    """A model in a session of its own, differentiated in one way."""

    def __init__(self, peer: Peer, make: Callable[[], Model], batch: int) -> None:
        self.model = model = make()
        with tf.Graph().as_default() as self.graph:
            v1.set_random_seed(7)
            placeholders = build_v1(model, batch)
            self.loss, self.variables = placeholders.loss, model.variables
            grads = peer.differentiate(make, batch, self.loss, self.variables)
            self.gradients = [tf.convert_to_tensor(g) for g in grads]
            squares = [tf.reduce_sum(tf.square(g)) for g in self.gradients]
            self.norm = tf.sqrt(tf.add_n(squares))
            self.stretch = v1.placeholder(tf.float32, ())
            pairs = zip(self.variables, self.gradients, strict=True)
            self.move = [v.assign_add(self.stretch * g / self.norm) for v, g in pairs]
            self.initial = v1.global_variables_initializer()
        self.fetches = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        self.config = v1.ConfigProto()
        for option, value in peer.rewriting.items():
            setattr(self.config.graph_options.rewrite_options, option, value)
        self.feed = placeholders.feed(model.example(batch))
        self.session = self._new_session()

    def _new_session(self) -> tf.compat.v1.Session:
        session = v1.Session(graph=self.graph, config=self.config)
        session.run(self.initial)
        return session

    def run(self) -> Any:
        return self.session.run(self.fetches, self.feed)

    def peak(self) -> int:
        self.run()
        return measure.session_peak(self.session, self.fetches, self.feed)

    def gradient_error(self) -> float | None:
        """See `gradient_error`. Each loss is the first of a new session."""
        with self._new_session() as session:
            loss, norm = session.run([self.loss, self.norm], self.feed)

        def moved(stretch: float) -> float:
            with self._new_session() as session:
                session.run(self.move, self.feed | {self.stretch: stretch})
                weights = session.run(self.variables)
            with self._new_session() as session:
                for variable, value in zip(self.variables, weights, strict=True):
                    start = variable.initializer
                    session.run(start, {start.inputs[1]: value})
                return float(session.run(self.loss, self.feed))

        return gradient_error(float(loss), float(norm), moved)


def gradient_error(loss: float, norm: float, moved: Callable[[float], float]) -> float | None:
    """How far the loss's change along the gradient is from what the gradient says.

    Args:
        loss: the loss.
        norm: the norm of all gradients together.
        moved: the loss after the weights were moved so far along the gradient, with the same random
            numbers.

    Returns:
        A fraction; None where the gradient is as good as zero.
    """
    if norm < _ZERO:
        return None
    stretch = _STRETCH * loss / norm
    return abs((moved(stretch) - moved(-stretch)) / (2 * stretch * norm) - 1)


def in_sessions(make: Callable[[], Model], batch: int) -> list[Row]:
    """All ways on TensorFlow."""
    rows, built = [], {}
    for name, peer in PEERS.items():
        row = Row(name, PLAIN)
        rows.append(row)
        try:
            one = Built(peer, make, batch)
            row.peak_bytes = one.peak()
            row.gradient_error = one.gradient_error()
            built[name] = one
        except Exception as error:
            row.error = _said(error)
    _time(rows, {name: one.run for name, one in built.items()}, PLAIN)
    for one in built.values():
        one.session.close()
    return rows


def _recomputed(part: Callable[..., tf.Tensor], *inputs: tf.Tensor) -> tf.Tensor:
    return tf.recompute_grad(part)(*inputs)


#: In a `tf.function`: what differentiates, what is put around each block, options of Grappler.
FUNCTIONS: dict[str, tuple[Callable[..., list], Callable | None, dict[str, bool]]] = {
    FUNCTION: (tf.gradients, None, {}),
    "tf.recompute_grad by block": (tf.gradients, _recomputed, {}),
    "tf.recompute_grad by block, Grappler off": (
        tf.gradients,
        _recomputed,
        {"disable_meta_optimizer": True},
    ),
    "ours, memory, in a tf.function": (gradients_memory, None, {}),
}


class Function:
    """A model's loss and gradients in a `tf.function`."""

    def __init__(self, label: str, way: str) -> None:
        (make, batch), _ = COMPARED[label]
        differentiate, block, options = FUNCTIONS[way]
        self.model = make()
        self.inputs = [tf.constant(array) for array in self.model.example(batch)]
        self.model.loss(*self.inputs)  # makes the variables
        if block is not None:
            self.model.block = block  # type: ignore[method-assign]
        self.variables = [*self.model.variables]
        self.options = options

        def step(*inputs: tf.Tensor) -> tuple[tf.Tensor, list]:
            loss = self.model.loss(*inputs)
            return loss, differentiate(loss, self.variables)

        self._step = step
        self.run = self.traced()

    def traced(self) -> Callable[[], tuple[tf.Tensor, list]]:
        """A run of the step, traced anew, so that random numbers begin anew."""
        tf.random.set_seed(7)
        run = functools.partial(tf.function(self._step, autograph=False), *self.inputs)
        if self.options:  # they count when a function runs for the first time
            tf.config.optimizer.set_experimental_options(self.options)
            run()
            tf.config.optimizer.set_experimental_options(dict.fromkeys(self.options, False))
        return run

    def gradient_error(self) -> float | None:
        """See the function of this name."""
        loss, grads = self.traced()()
        grads = [tf.convert_to_tensor(g) for g in grads]
        norm = tf.linalg.global_norm(grads)

        def moved(stretch: float) -> float:
            for variable, gradient in zip(self.variables, grads, strict=True):
                variable.assign_add(stretch * gradient / norm)
            found = float(self.traced()()[0])
            for variable, gradient in zip(self.variables, grads, strict=True):
                variable.assign_sub(stretch * gradient / norm)
            return found

        return gradient_error(float(loss), float(norm), moved)


def make_function(label: str, way: str) -> Callable[[], Any]:
    """A step for a fresh process."""
    return Function(label, way).run


def in_functions(label: str) -> list[Row]:
    """Ways that need a `tf.function`."""
    rows, built = [], {}
    for way in FUNCTIONS:
        row = Row(way, FUNCTION)
        rows.append(row)
        with silenced():
            try:
                row.peak_bytes = measure.function_peak(make_function, label, way)
            except RuntimeError as error:
                row.error = _said(error)
                continue
        built[way] = Function(label, way)
        row.gradient_error = built[way].gradient_error()
    _time(rows, {way: one.run for way, one in built.items()}, FUNCTION)
    return rows


def in_keras(label: str | None) -> list[Row]:
    """Plain `fit` and `RematScope`; no rows where no model of Keras is like it."""
    rows: list[Row] = []
    if label is None:
        return rows
    for name, method in (("Keras fit", "plain"), ('Keras RematScope("full")', "RematScope")):
        row = Row(name, "Keras fit")
        rows.append(row)
        with silenced():  # the process prints a traceback, too
            try:
                row.peak_bytes = measure.function_peak(
                    keras_fit.fit_of, keras_fit.compiled, label, method
                )
            except RuntimeError as error:
                row.error = _said(error)
    return rows


def _time(rows: list[Row], steps: dict[str, Callable[[], Any]], plain: str) -> None:
    """Fills in the times of the ways that work."""
    times = timed(steps, plain)
    for row in rows:
        if row.peer in times:
            row.time_ratio = times[row.peer]["time_ratio"]


def _said(error: Exception) -> str:
    """The first sentence of a message."""
    text = one_line(error)
    found = re.search(r"The custom_gradient decorator[^.]*\.", text)
    return found[0] if found else text[:200]
