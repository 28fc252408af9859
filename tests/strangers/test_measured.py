"""Programs that nobody here wrote: the same values, less memory, and what was foretold, measured.

A table of all is printed at the end of the run.
"""

import dataclasses
import importlib.util

import pytest

from tests.strangers import features, hub, hugging_face, probability, processes
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


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), rows())
def test_a_step_takes_what_was_foretold(module, name, record_property):
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
