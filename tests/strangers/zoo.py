"""Models that nobody here wrote: all of keras.applications, and the backbones of keras-hub."""

import functools
import inspect

import keras
import numpy as np
import tensorflow as tf

from tests.strangers.backbones import BACKBONES

#: The images that an application needs where 32 pixels are too few.
_SIZES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71, "NASNetLarge": 331}
_SIZES |= {"NASNetMobile": 224}
BATCH = 2


def _application(name):
    size = _SIZES.get(name, 32)
    model = getattr(keras.applications, name)(
        weights=None, include_top=False, input_shape=(size, size, 3), pooling="avg"
    )
    return model, np.random.default_rng(0).random((BATCH, size, size, 3), "float32")


APPLICATIONS = [n for n, value in vars(keras.applications).items() if inspect.isfunction(value)]

#: name: builds a model and inputs for it.
ZOO = {name: functools.partial(_application, name) for name in APPLICATIONS} | BACKBONES


def specified(inputs):
    return tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), inputs)
