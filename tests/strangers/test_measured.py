"""Programs that nobody here wrote: the same values, less memory, and what was predicted, measured.

A table of all is printed at the end of the run.
"""

import dataclasses
import importlib.util
import itertools
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.strangers import features, hub, hugging_face, measured, probability, processes
from tests.strangers.measured import ROUNDING, Measured, compare_bits, faults, measure, table

#: module of programs: the package that they need, if any but those of the other tests
PACKAGES = {
    features: None,
    hub: None,
    hugging_face: "transformers",
    probability: "tensorflow_probability",
    processes: "gpflow",
}
#: A key of ASKED: what the values are compared for where oneDNN's fusions round otherwise.
WITHOUT_ONEDNN = {"memory": "memory", "0.6": "half"}


def rows():
    found = []
    for module, package in PACKAGES.items():
        absent = package and not importlib.util.find_spec(package)
        for name in module.STRANGERS:
            marks = [pytest.mark.skip(f"{package} is not installed: extra zoo")] if absent else []
            short = module.__name__.rpartition(".")[2]
            found.append(pytest.param(module, name, marks=marks, id=f"{short}: {name}"))
    return found


def test_what_is_known_is_of_programs():
    for module in PACKAGES:
        assert all(map(callable, module.STRANGERS.values()))
        assert module.KNOWN.keys() <= module.STRANGERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), rows())
def test_a_step_takes_what_was_predicted(module, name, record_property):
    found = measure(module.__name__, name)
    row = {way: dataclasses.asdict(one) for way, one in found.items()}
    record_property("measured", (name, row))
    for way, one in found.items():
        assert one.error <= ROUNDING, way
        if one.error:
            compare_bits(module.__name__, name, WITHOUT_ONEDNN[way])
    said = faults(found)
    if said and name in module.KNOWN:
        pytest.xfail(f"{module.KNOWN[name]}: {'; '.join(said)}")
    assert not said


def layers(trace=lambda: 1.0):
    """A program in small, of the form of the others; `trace` is called when it is traced."""
    weights = [tf.Variable(np.float32(np.eye(8) / 2)) for _ in range(6)]

    def forward(x):
        for w in weights:
            x = tf.sin(tf.tanh(x @ w)) * trace()
        return x

    return forward, [np.ones((64, 8), "float32")], weights


#: Stand-ins for the modules of programs; the second program is another one in each trace.
STRANGERS = {"the same": layers, "another": lambda: layers(itertools.count(1).__next__)}
KNOWN = {"the same": "a reason"}
HERE = sys.modules[__name__]


@pytest.fixture
def in_this_process(monkeypatch):
    """What is said to run in a process of its own runs in this one."""
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    monkeypatch.setattr(measured, "_in_a_process", lambda _, *row: measured._main(*row))


@pytest.mark.parametrize("way", WITHOUT_ONEDNN.values())
def test_values_are_compared_bit_by_bit(in_this_process, way):
    compare_bits(__name__, "the same", way)
    with pytest.raises(AssertionError):
        compare_bits(__name__, "another", way)


def test_what_a_row_comes_to(in_this_process, monkeypatch):
    def row(name, **memory):
        monkeypatch.setattr(HERE, "measure", lambda *_: found(**memory))
        test_a_step_takes_what_was_predicted(HERE, name, lambda *_: None)

    row("another")
    row("the same", error=1e-9)
    with pytest.raises(AssertionError, match="memory"):
        row("the same", error=1e-2)
    with pytest.raises(AssertionError):
        row("another", error=1e-9)
    with pytest.raises(AssertionError, match=r"predicted 22\.0 MB, measured 27\.0 MB"):
        row("another", measured=27_000_000)
    with pytest.raises(pytest.xfail.Exception, match=r"a reason: memory: predicted 22\.0 MB"):
        row("the same", measured=27_000_000)


def found(**memory):
    plain = Measured(50_000_000, 51_000_000, False, 0.0, None)
    less = {"predicted": 22_000_000, "measured": 23_000_000, "planned": True, "error": 0.0}
    return {"plain": plain, "memory": Measured(**{**less, "refused": None, **memory})}


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({}, []),
        ({"measured": 27_000_000}, ["memory: predicted 22.0 MB, measured 27.0 MB"]),
        ({"predicted": 5_000_000, "measured": 8_000_000}, []),
        (
            {"predicted": 48_000_000, "measured": 52_000_000},
            ["memory: takes 52.0 MB, plain 51.0 MB"],
        ),
        ({"planned": False, "predicted": 50_000_000, "measured": 52_000_000}, []),
        ({"refused": 30_000_000}, []),
        ({"refused": 52_000_000}, ["memory: refused 52.0 MB, which plain meets with 51.0 MB"]),
    ],
)
def test_what_is_a_fault(memory, says):
    assert faults(found(**memory)) == says


def test_table():
    heading, line, refused = table([("one", found()), ("two", found(refused=30_000_000))])
    assert heading.split()[:2] == ["model", "plain"]
    assert line.split() == "one 50.0 51.0 22.0 23.0 0.45 =".split()
    assert refused.endswith("30.0 refused")
