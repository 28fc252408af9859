"""Every public layer of keras.layers: how to make it and what to feed it.

Inputs are standard normal, or uniform in [0, high) where high is given (pixels, tokens).
Where flows is false the input gets no gradient, or only zeros: train something behind it.
Names with a space are further variants of the layer named before the space.
"""

from collections import namedtuple
from functools import partial

import keras
import numpy as np
from keras import layers as L

Entry = namedtuple("Entry", "make shapes dtype high apply flows")


def inputs(entry, batch=8, seed=0):
    rng = np.random.default_rng(seed)
    draw = partial(rng.uniform, 0, entry.high) if entry.high else rng.standard_normal
    return [draw(size=(batch, *shape)).astype(entry.dtype) for shape in entry.shapes]


def listed(layer, *xs):
    return layer(xs[0] if len(xs) == 1 else list(xs), training=True)


def spread(layer, *xs, **kw):
    return layer(*xs, training=True, **kw)


def boxed(layer, images, boxes):
    boxes = {"boxes": boxes, "labels": boxes[..., 0]}
    return layer({"images": images, "bounding_boxes": boxes}, training=True)


def labelled(layer, images, labels):
    return layer({"images": images, "labels": labels}, training=True)


def on(*shapes, dtype="float32", high=None, apply=listed, flows=True):
    """The maker of entries for layers that take these shapes (without the batch)."""

    def entry(layer, *args, **kw):
        return Entry(partial(layer, *args, **kw), shapes, dtype, high, apply, flows)

    return entry


SEQ, IMAGE, VOLUME, RGB = (24, 8), (16, 16, 4), (8, 8, 8, 2), (16, 16, 3)
vector, sequence, image = on((32,)), on(SEQ), on(IMAGE)
sequences, images, three_images = on(SEQ, SEQ), on(IMAGE, IMAGE), on(IMAGE, IMAGE, IMAGE)
attention = on(SEQ, SEQ, apply=spread)
pixels, dead_pixels = on(RGB, high=255), on(RGB, high=255, flows=False)
tokens = on((24,), dtype="int32", high=32, flows=False)


def each(entry, names, *args, **kw):
    return {name: entry(getattr(L, name), *args, **kw) for name in names.split()}


def chain(*makes):
    return lambda: L.Pipeline([make() for make in makes])


def embed(**kw):
    return L.Embedding(32, 16, **kw)


def steps(rnn, *args, **kw):
    """The recurrent layer with one output per step."""
    return rnn(*args, return_sequences=True, **kw)


def quantized(mode, **kw):
    layer = L.Dense(256, **kw)
    layer.build((None, 32))
    layer.quantize(mode)
    return layer


def dimensional(n, shape):
    """The layers that come in 1D, 2D and 3D."""
    entry = on(shape)
    made = {
        **each(entry, f"AdaptiveAveragePooling{n}D AdaptiveMaxPooling{n}D", 5),
        **each(entry, f"AveragePooling{n}D MaxPooling{n}D UpSampling{n}D", 2),
        **each(entry, f"GlobalAveragePooling{n}D GlobalMaxPooling{n}D"),
        **each(entry, f"Cropping{n}D ZeroPadding{n}D", 1),
        **each(entry, f"SpatialDropout{n}D", 0.3, seed=1),
        **each(entry, f"Conv{n}D Conv{n}DTranspose", 6, 3),
        **each(on((4, *[8] * n, 2)), f"ConvLSTM{n}D", 4, 3, padding="same"),
    }
    if n < 3:
        made |= each(entry, f"DepthwiseConv{n}D", 3) | each(entry, f"SeparableConv{n}D", 8, 3)
    return made


LAYERS = {
    **dimensional(1, SEQ),
    **dimensional(2, IMAGE),
    **dimensional(3, VOLUME),
    **each(image, "BatchNormalization LayerNormalization RMSNormalization UnitNormalization"),
    **each(image, "ELU Flatten Identity LeakyReLU ReLU Softmax"),
    **each(image, "AlphaDropout Dropout GaussianDropout GaussianNoise", 0.3, seed=1),
    **each(three_images, "Add Average Concatenate Maximum Minimum Multiply"),
    "Subtract": images(L.Subtract),
    "Dot": sequences(L.Dot, axes=2),
    "Activation": image(L.Activation, "gelu"),
    "ActivityRegularization": image(L.ActivityRegularization, l1=0.01, l2=0.01),
    "GroupNormalization": image(L.GroupNormalization, 2),
    "SpectralNormalization": image(lambda: L.SpectralNormalization(L.Conv2D(8, 3))),
    "Normalization": image(L.Normalization, mean=0.5, variance=2.0),
    "Rescaling": image(L.Rescaling, 2.0, 0.5),
    "Lambda": image(L.Lambda, lambda x: keras.ops.sin(x) * x),
    "Permute": image(L.Permute, (3, 1, 2)),
    "PReLU": image(L.PReLU, keras.initializers.Constant(0.25)),
    "Reshape": image(L.Reshape, (32, 32)),
    "Pipeline": image(chain(partial(L.Conv2D, 8, 3), L.ReLU, partial(L.Dropout, 0.3, seed=1))),
    "TimeDistributed": image(lambda: L.TimeDistributed(L.Conv1D(8, 3))),
    "Dense": vector(L.Dense, 256, "tanh"),
    "RepeatVector": vector(L.RepeatVector, 8),
    "EinsumDense": sequence(L.EinsumDense, "btc,cd->btd", (None, 16), bias_axes="d"),
    "Masking": sequence(L.Masking),
    "SimpleRNN": sequence(steps, L.SimpleRNN, 16),
    "GRU": sequence(steps, L.GRU, 16),
    "LSTM": sequence(steps, L.LSTM, 16),
    "SimpleRNNCell": sequence(lambda: steps(L.RNN, L.SimpleRNNCell(16))),
    "GRUCell": sequence(lambda: steps(L.RNN, L.GRUCell(16))),
    "LSTMCell": sequence(lambda: steps(L.RNN, L.LSTMCell(16))),
    "RNN": sequence(lambda: steps(L.RNN, [L.GRUCell(8), L.LSTMCell(16)])),
    "StackedRNNCells": sequence(
        lambda: steps(L.RNN, L.StackedRNNCells([L.LSTMCell(8), L.LSTMCell(16)]))
    ),
    "Bidirectional": sequence(lambda: L.Bidirectional(steps(L.LSTM, 8))),
    "Attention": sequences(L.Attention),
    "AdditiveAttention": sequences(L.AdditiveAttention),
    "MultiHeadAttention": attention(L.MultiHeadAttention, 2, 8),
    "GroupQueryAttention": attention(L.GroupQueryAttention, 8, 4, 2),
    "STFTSpectrogram": on((256, 2))(L.STFTSpectrogram, frame_length=32),
    "MelSpectrogram": on((256,))(L.MelSpectrogram, 64, 16, num_mel_bins=16),
    "Embedding": tokens(embed),
    "ReversibleEmbedding": tokens(L.ReversibleEmbedding, 32, 16),
    "CategoryEncoding": tokens(chain(partial(L.CategoryEncoding, 32), partial(L.Dense, 256))),
    "Discretization": on(IMAGE, flows=False)(
        chain(partial(L.Discretization, [-1.0, 0.0, 1.0]), embed)
    ),
    "HashedCrossing": on((), (), dtype="int32", high=32, flows=False)(
        chain(partial(L.HashedCrossing, 32), partial(L.Embedding, 32, 128))
    ),
    "Hashing": tokens(chain(partial(L.Hashing, 32), embed)),
    "IntegerLookup": tokens(chain(partial(L.IntegerLookup, vocabulary=[*range(24)]), embed)),
    **each(pixels, "CenterCrop Resizing", 12, 14),
    **each(dead_pixels, "ContrastLimitedAdaptiveHistogramEqualization", tile_grid_size=(4, 4)),
    "AutoContrast": pixels(L.AutoContrast),
    "Equalization": dead_pixels(L.Equalization),
    "MaxNumBoundingBoxes": on(RGB, (5, 4), high=16, apply=boxed)(
        L.MaxNumBoundingBoxes, 8, bounding_box_format="xyxy"
    ),
    **each(pixels, "AugMix CutMix MixUp RandomErasing RandomElasticTransform RandomFlip", seed=1),
    **each(pixels, "RandomGaussianBlur RandomGrayscale RandomInvert", seed=1),
    "RandAugment": pixels(L.RandAugment, seed=2),  # some draws stop all gradients; these do not
    **each(pixels, "RandomBrightness RandomColorDegeneration RandomContrast", 0.4, seed=1),
    **each(pixels, "RandomPerspective RandomRotation RandomSharpness RandomZoom", 0.4, seed=1),
    **each(pixels, "RandomShear RandomTranslation Solarization", 0.3, 0.3, seed=1),
    **each(dead_pixels, "RandomHue RandomSaturation", 0.4, seed=1),
    "RandomColorJitter": dead_pixels(L.RandomColorJitter, (0, 255), 0.2, 0.2, 0.2, 0.2, seed=1),
    "RandomCrop": pixels(L.RandomCrop, 12, 12, seed=1),
    "RandomPosterization": dead_pixels(L.RandomPosterization, 3, seed=1),
}

LAYERS |= {
    "AdditiveAttention dropout": sequences(L.AdditiveAttention, dropout=0.2, seed=1),
    "Attention concat": on(SEQ, SEQ, SEQ)(L.Attention, True, "concat", dropout=0.2, seed=1),
    "AveragePooling2D same": image(L.AveragePooling2D, 3, 1, "same"),
    "BatchNormalization plain": image(L.BatchNormalization, 1, center=False, scale=False),
    "BatchNormalization renorm": image(L.BatchNormalization, renorm=True),
    "Bidirectional sum": sequence(lambda: L.Bidirectional(steps(L.GRU, 16), "sum")),
    "Concatenate axis": images(L.Concatenate, 1),
    "Conv1D causal": sequence(L.Conv1D, 16, 3, padding="causal", dilation_rate=2),
    "Conv2D dilated": image(L.Conv2D, 8, 3, padding="same", dilation_rate=2),
    "Conv2D groups": image(L.Conv2D, 8, 3, groups=2, activation="relu"),
    "Conv2D strided": image(L.Conv2D, 16, 3, 2, "same", use_bias=False),
    "Conv2DTranspose strided": image(L.Conv2DTranspose, 4, 3, 2, "same"),
    "ConvLSTM2D sequences": on((4, 8, 8, 2))(steps, L.ConvLSTM2D, 4, 3, dropout=0.2, seed=1),
    "Dense float8": vector(quantized, "float8"),
    "Dense int8": vector(quantized, "int8", lora_rank=4),
    "Dense lora": vector(L.Dense, 256, lora_rank=4),
    "Dense mixed_bfloat16": vector(L.Dense, 256, dtype="mixed_bfloat16"),
    "Dense regularized": vector(L.Dense, 256, kernel_regularizer="l2", activity_regularizer="l1"),
    "DepthwiseConv2D multiplier": image(L.DepthwiseConv2D, 3, depth_multiplier=2),
    "Dot normalized": sequences(L.Dot, axes=2, normalize=True),
    "Dropout noise_shape": image(L.Dropout, 0.3, (None, 1, 1, 4), seed=1),
    "Embedding masked": tokens(chain(partial(embed, mask_zero=True), partial(L.LSTM, 64))),
    "GRU reset_before": sequence(steps, L.GRU, 16, reset_after=False),
    "GRU unrolled": sequence(steps, L.GRU, 16, unroll=True),
    "GroupNormalization instance": image(L.GroupNormalization, -1),
    "GroupQueryAttention scores": on(
        SEQ, SEQ, SEQ, apply=partial(spread, return_attention_scores=True)
    )(L.GroupQueryAttention, 8, 4, 1),
    "LSTM dropout": sequence(steps, L.LSTM, 16, dropout=0.2, recurrent_dropout=0.2, seed=1),
    "LSTM stateful": sequence(steps, L.LSTM, 16, stateful=True),
    "LSTM states": sequence(L.LSTM, 16, return_state=True, go_backwards=True),
    "LSTM unrolled": sequence(steps, L.LSTM, 16, unroll=True),
    "LayerNormalization axes": image(L.LayerNormalization, [1, 2, 3]),
    "MixUp labelled": on(RGB, (10,), high=255, apply=labelled)(L.MixUp, seed=1),
    "MultiHeadAttention axes": on((8, 8, 4), (8, 8, 4), apply=spread)(
        L.MultiHeadAttention, 2, 8, attention_axes=(1, 2)
    ),
    "MultiHeadAttention causal": on(SEQ, SEQ, apply=partial(spread, use_causal_mask=True))(
        L.MultiHeadAttention, 2, 8, dropout=0.2, seed=1
    ),
    "MultiHeadAttention gated": attention(L.MultiHeadAttention, 2, 8, use_gate=True),
    "MultiHeadAttention window": attention(L.MultiHeadAttention, 2, 8, sliding_window=4),
    "ReLU clipped": image(L.ReLU, 1.0, negative_slope=0.1, threshold=0.2),
    "Resizing bicubic": pixels(L.Resizing, 12, 20, "bicubic", antialias=True),
    "SpectralNormalization iterated": vector(lambda: L.SpectralNormalization(L.Dense(256), 3)),
    "UpSampling2D bilinear": image(L.UpSampling2D, 2, interpolation="bilinear"),
}

SKIPPED = {
    "FlaxLayer": "needs flax and JAX, which are not installed",
    "InputLayer": "only a placeholder in functional models, its call does nothing",
    "JaxLayer": "needs JAX, which is not installed",
    "Layer": "abstract base class",
    "StringLookup": "takes strings",
    "TFSMLayer": "only reloads a SavedModel from disk",
    "TextVectorization": "takes strings",
    "TorchModuleWrapper": "works with the torch backend only",
    "Wrapper": "abstract base class, has no call of its own",
}

ALIASES = {}
for _name, _class in vars(L).items():
    if isinstance(_class, type) and issubclass(_class, L.Layer):
        _first = next(n for n in (*LAYERS, *SKIPPED) if getattr(L, n, None) is _class)
        if _name != _first:
            ALIASES[_name] = _first
