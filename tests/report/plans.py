"""Plans of the test models, made once."""

import functools
import warnings

import pytest
import tensorflow as tf

from memory_saving_gradients import get_plans, gradients
from test_models import build_v1
from tests.cases import MODELS, options_for

#: The models, with the option that each is planned with.
PLANS = {
    **dict.fromkeys(MODELS, "memory"),
    "resnet20": "budget",
    "unet": "speed",
    "vgg": "tight budget",
}

#: Their names, as cases of a test.
CASES = [
    name
    if name in ("resnet20", "unet", "vgg", "gpt")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in PLANS
]


@functools.cache
def plan_of(name, how=None):
    make, batch = MODELS[name]
    with tf.Graph().as_default() as graph, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = build_v1(make(), batch)
        gradients(step.loss, step.variables, **options_for(name, how or PLANS[name]))
        return get_plans(graph)[-1]
