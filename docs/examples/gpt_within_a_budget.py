"""Fine-tunes a GPT-like model of characters in half of the memory that it would take.

    python docs/examples/gpt_within_a_budget.py

The model is first trained for a moment on one text, saved, and loaded again, as a model from
elsewhere would be. Then its upper half is fine-tuned on another text, within a budget. To use it
for a model of your own, replace `pretrained` and keep the three lines at the end.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

import memory_saving_gradients as msg

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 4, 128, 4, 128, 16


def gpt() -> keras.Model:
    """A decoder of characters: token and position embeddings, pre-norm blocks with dropout."""
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    h = layers.Embedding(256, WIDTH)(tokens)
    h = h + layers.Embedding(LENGTH, WIDTH)(keras.ops.arange(LENGTH))
    for i in range(LAYERS):
        norm = layers.LayerNormalization(name=f"block_{i}_norm_1")(h)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"block_{i}_attention")
        h = h + layers.Dropout(0.1)(attention(norm, norm, use_causal_mask=True))
        norm = layers.LayerNormalization(name=f"block_{i}_norm_2")(h)
        wide = layers.Dense(4 * WIDTH, "gelu", name=f"block_{i}_wide")(norm)
        h = h + layers.Dropout(0.1)(layers.Dense(WIDTH, name=f"block_{i}_narrow")(wide))
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(h)))


def windows(text: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` stretches of a text, and the same moved on by one character."""
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(codes) - LENGTH - 1, count)
    stretches = codes[starts[:, None] + np.arange(LENGTH + 1)]
    return stretches[:, :-1], stretches[:, 1:]


def pretrained(path: Path) -> keras.Model:
    """The model after a first training, from a file."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = gpt()
    model.compile("adam", loss)
    model.fit(*windows(Path(np.__file__).read_text(), 4 * BATCH), batch_size=BATCH, verbose=2)
    model.save(path)
    return keras.models.load_model(path)


with tempfile.TemporaryDirectory() as folder:
    model = pretrained(Path(folder) / "gpt.keras")

for layer in model.layers:  # the lower half stays as it is
    number = layer.name.split("_")[1] if layer.name.startswith("block_") else ""
    layer.trainable = not number or int(number) >= LAYERS // 2
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(1e-4), loss)

x, y = windows(Path(keras.__file__).read_text() + Path(__file__).read_text(), 4 * BATCH)
msg.keras.save_memory(model, memory_budget=0.5)  # or bytes: "4GiB"
model.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[msg.keras.MemoryReport()], verbose=2)
msg.keras.get_plans(model)[-1].summary()
