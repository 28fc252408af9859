"""Plans of the test models, made once."""

import collections
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


def are_recomputed(plan, names):
    """Whether these are the ops that run again, and those of the forward pass that run late."""
    found, recomputed = collections.Counter(names), collections.Counter(plan.recomputed)
    late = found - recomputed
    runs = collections.Counter(plan.problem.ops[i].name for i in plan.schedule)
    backward = {op.name for op in plan.problem.ops if op.backward}
    return not recomputed - found and all(runs[op] == 1 and op not in backward for op in late)
