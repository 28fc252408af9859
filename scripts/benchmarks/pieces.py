"""Large tensors in pieces: language models with wide vocabularies, and attention over many tokens.

Sessions and Keras's `fit` have default options. What XLA's compiler allocates for an H100 that need
not be there is by its own report (the extra `xla-gpu`); beside it stands a chunked loss written by
hand in JAX, by `jax.checkpoint` and `jax.lax.map`. On 2 cores it takes about 15 minutes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from memory_saving_gradients import get_plans, gradients
from memory_saving_gradients.keras import save_memory
from memory_saving_gradients.measure import compiled_temporaries
from scripts.benchmarks.common import Section, in_session, measure_ways, planned
from scripts.benchmarks.keras_fit import fit_step
from scripts.benchmarks.xla import GPU, function_of, in_jax
from test_models import GPT, Model

#: label: the model, and the batch.
NETWORKS: dict[str, tuple[Callable[[], Model], int]] = {
    "GPT, 6 layers, 32,000 words, batch 8": (functools.partial(GPT, vocabulary=32_000), 8),
    "GPT, 2 layers, 2,048 tokens, batch 1": (functools.partial(GPT, 2, length=2048), 1),
}

WAYS: dict[str, dict[str, Any]] = {
    "memory": {"checkpoints": "memory"},
    "pieces": {"checkpoints": "memory", "pieces": True},
    "8 pieces": {"checkpoints": "memory", "pieces": 8},
}

#: As the smallest GPT-2, with 6 layers; the same in peers_jax.
GPT_2 = functools.partial(GPT, 6, 768, 1024, 50_257, 12)


def network(label: str) -> dict[str, Any]:
    """Peaks and times in sessions."""
    make, batch = NETWORKS[label]
    ways = {"tf.gradients": tf.gradients} | {
        way: functools.partial(gradients, **options) for way, options in WAYS.items()
    }
    return measure_ways(
        {way: functools.partial(in_session, make, batch, by) for way, by in ways.items()}
    )


def language_model(way: str) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A causal model of 128,000 words on 512 tokens, with a batch of 4."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    words, tokens, width = 128_000, 512, 256
    inputs = keras.Input((tokens,), dtype="int32")
    h = layers.Embedding(words, width)(inputs)
    for _ in range(4):
        x = layers.LayerNormalization()(h)
        h += layers.MultiHeadAttention(4, 64)(x, x, use_causal_mask=True)
        x = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(h))
        h += layers.Dense(width)(x)
    model = keras.Model(inputs, layers.Dense(words)(layers.LayerNormalization()(h)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if way in WAYS:
        save_memory(model, **WAYS[way])
    x, y = np.random.default_rng(0).integers(0, words, (2, 4, tokens))
    return model, x, y


def fit(label: str) -> dict[str, Any]:
    """Peaks of the process and times in Keras's `fit`."""
    ways = {
        way: functools.partial(fit_step, language_model, way, ours=way in WAYS)
        for way in ("plain", *WAYS)
    }
    return measure_ways(ways)


def compiled(label: str) -> dict[str, Any]:
    """What XLA allocates for a described GPU."""
    rows: dict[str, dict[str, Any]] = {}
    for way, options in {"tf.gradients": None, **WAYS}.items():
        by = functools.partial(gradients, device=GPU, **options) if options else tf.gradients
        step, inputs = function_of(GPT_2(), 8, by)
        plans = get_plans(step.get_concrete_function(*inputs).graph)
        rows[way] = {"bytes": compiled_temporaries(step, *inputs, device=GPU)}
        rows[way] |= planned(plans[-1]) if plans else {}
    with tempfile.TemporaryDirectory() as folder:
        rows |= dict(in_jax("gpt2", Path(folder)))
    return rows


SECTIONS = {
    "networks": Section(NETWORKS, network),
    "keras": Section(["Keras, 4 layers, 128,000 words, 512 tokens, batch 4"], fit),
    "xla": Section(["GPT-2, 6 layers, 1,024 tokens, batch 8"], compiled),
}
