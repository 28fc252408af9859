"""Segments volumes with a 3-D U-Net, three times as many at a time as fit plainly.

    python docs/examples/volumes_with_a_unet.py

The volumes are noise with a ball in it, and the mask is the ball. `max_batch` says what fits into
the memory, plain and with recomputation; the model then trains with the largest batch that does.
"""

import os

# TensorFlow's own default where the processor has AVX-512. Without oneDNN a gradient of a 3-D
# convolution takes up to 25 times its inputs as scratch space.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
from keras import layers

import memory_saving_gradients as msg

SIDE, WIDTH, MEMORY = 32, 8, "100MB"


def unet() -> keras.Model:
    """Three levels of two convolutions each, with skips."""

    def two_convolutions(x, filters: int, name: str):
        for i in range(2):
            x = layers.Conv3D(filters, 3, padding="same", use_bias=False, name=f"{name}_{i}")(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    x = inputs = keras.Input((SIDE, SIDE, SIDE, 1))
    skips = []
    for level in range(3):
        x = two_convolutions(x, WIDTH * 2**level, f"down_{level}")
        skips.append(x)
        x = layers.MaxPooling3D()(x)
    x = two_convolutions(x, WIDTH * 8, "bottom")
    for level in reversed(range(3)):
        x = layers.Conv3DTranspose(WIDTH * 2**level, 2, strides=2)(x)
        x = two_convolutions(layers.concatenate([x, skips[level]]), WIDTH * 2**level, f"up_{level}")
    return keras.Model(inputs, layers.Conv3D(1, 1, activation="sigmoid")(x))


def volumes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy volumes, and the ball that is in each."""
    random = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij"), -1)
    centres = random.uniform(SIDE / 4, 3 * SIDE / 4, (count, 1, 1, 1, 3))
    masks = np.linalg.norm(places - centres, axis=-1, keepdims=True) < SIDE / 5
    noise = random.standard_normal(masks.shape)
    return (masks + noise).astype(np.float32), masks.astype(np.float32)


model = unet()
model.compile("adam", "binary_crossentropy")

found = msg.max_batch(model, MEMORY)
print(found)
plain, saving = found.ways["plain"], found.ways["memory"]
assert saving.batch_size > 2 * plain.batch_size

x, y = volumes(2 * saving.batch_size)
msg.keras.save_memory(model)
report = msg.keras.MemoryReport()
model.fit(x, y, batch_size=saving.batch_size, epochs=2, callbacks=[report], verbose=2)
