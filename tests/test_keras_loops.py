"""Recurrent layers of Keras through `train_on_batch`: weights are those of plain training."""

import functools

import keras
import numpy as np
import pytest

from memory_saving_gradients import get_plans
from memory_saving_gradients.keras import save_memory
from memory_saving_gradients.measure import StepPeak
from memory_saving_gradients.pipeline import plan_and_rewrite
from tests.loops import all_in_segments

L = keras.layers


@keras.saving.register_keras_serializable("tests")
class Cell(L.Layer):
    """A cell of a user's own."""

    state_size = output_size = 8

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))
        self.recurrent = self.add_weight(shape=(8, 8))

    def call(self, x, states):
        h = keras.ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return h, [h]


SEQUENCE = (10, 6)
#: name: the shape of an example, and the layers.
LAYERS = {
    "bidirectional, masked": (
        SEQUENCE,
        lambda: [L.Masking(), L.Bidirectional(L.LSTM(8, return_sequences=True)), L.GRU(8)],
    ),
    "recurrent dropout": (SEQUENCE, lambda: [L.LSTM(8, dropout=0.2, recurrent_dropout=0.3)]),
    "ConvLSTM1D": ((6, 9, 2), lambda: [L.ConvLSTM1D(4, 3)]),
    "ConvLSTM2D": ((6, 9, 9, 2), lambda: [L.ConvLSTM2D(4, 3, return_sequences=True)]),
    "stacked cells": (SEQUENCE, lambda: [L.RNN([L.GRUCell(8), L.LSTMCell(7)])]),
    "own cell, backwards": (
        SEQUENCE,
        lambda: [L.RNN(Cell(), return_sequences=True, go_backwards=True)],
    ),
    "stateful": (SEQUENCE, lambda: [L.GRU(8, stateful=True)]),
    "any steps": ((None, 6), lambda: [L.LSTM(8)]),
    "older GRU, simple": (
        SEQUENCE,
        lambda: [L.GRU(8, reset_after=False, return_sequences=True), L.SimpleRNN(5)],
    ),
}


def trained(name, every):
    """Losses and weights after steps of several lengths, if any do; and the plan."""
    shape, layers = LAYERS[name]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(batch_shape=(8, *shape)), *layers()])
    model.compile("sgd", "mse", jit_compile=False)
    if every:
        save_memory(model)
    random = np.random.RandomState(0)
    losses = []
    for steps in [5, 9, 1] if shape[0] is None else [shape[0]] * 2:
        x = random.randn(8, steps, *shape[1:]).astype("f")
        x[:, -3:] = 0
        made = model.compute_output_shape(x.shape)
        losses.append(model.train_on_batch(x, random.randn(*made).astype("f")))
    return [np.ravel(losses), *(w.numpy() for w in model.weights)], get_plans(
        model
    ) if every else []


@functools.cache
def plainly(name):
    return trained(name, 0)[0]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sweep(4)
def test_weights_are_equal(name, every, monkeypatch):
    monkeypatch.setattr(plan_and_rewrite, "choose", all_in_segments(every))
    made, plans = trained(name, every)
    assert plans
    assert {loop.every for loop in plans[-1].loops} == {every}
    for ours, plain in zip(made, plainly(name), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_a_recurrent_network_takes_less():
    def peak(ours):
        keras.utils.set_random_seed(0)
        layers = [L.LSTM(128, return_sequences=True), L.LSTM(128), L.Dense(1)]
        model = keras.Sequential([keras.Input((256, 64)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
        if ours:
            save_memory(model)
        random = np.random.RandomState(0)
        x, y = random.randn(64, 256, 64).astype("f"), random.randn(64, 1).astype("f")
        model.train_on_batch(x, y)
        step = StepPeak()
        model.train_on_batch(x, y)
        return step.bytes()

    assert peak(ours=True) < 0.5 * peak(ours=False)


def test_a_step_of_the_cell_that_nothing_reads_is_not_waited_for():
    """Keras computes one outside the loop; all layers ran a second time after it."""
    layers = [L.LSTM(32, return_sequences=True), L.LSTM(32, return_sequences=True), L.Dense(1)]
    model = keras.Sequential([keras.Input((128, 8)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    save_memory(model, memory_budget=0.5)
    random = np.random.RandomState(0)
    model.train_on_batch(random.randn(16, 128, 8), random.randn(16, 128, 1))
    plan = get_plans(model)[-1]
    first = plan.problem.forward_count
    begins = next(place for place, op in enumerate(plan.schedule) if op >= first)
    assert set(plan.schedule[:begins]) == set(range(first))


def test_a_report_foretells_what_is_planned():
    from memory_saving_gradients.doors.traced_step import traced_step
    from memory_saving_gradients.options.options import Options

    model = keras.Sequential([keras.Input((128, 32)), L.LSTM(64), L.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    (looked_at,) = traced_step(model, options=Options("memory")).plans(64)
    save_memory(model, batch_size=64)
    random = np.random.RandomState(0)
    model.train_on_batch(random.randn(64, 128, 32), random.randn(64, 1))
    (planned,) = get_plans(model)
    assert [loop.every for loop in looked_at.loops] == [loop.every for loop in planned.loops]
    assert looked_at.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.3)
    assert looked_at.peak_bytes < 0.5 * looked_at.baseline_peak_bytes
