"""How long CPU kernels take, against measurements and their exceptions."""

import json
import math
from pathlib import Path

import tensorflow as tf

from memory_saving_gradients.graph.cpu_kernels import SLOW, times_estimate
from scripts.benchmarks import kernels


def test_each_factor_is_near_the_measured_one():
    rows = json.loads(Path(kernels.__file__).with_suffix(".json").read_text())["results"]["kernels"]
    assert set(rows) == set(SLOW)
    off = {kind: row["factor"] / SLOW[kind] for kind, row in rows.items()}
    assert {kind: times for kind, times in off.items() if not 1 / 4 < times < 4} == {}
    assert 0.8 < math.exp(sum(map(math.log, off.values())) / len(off)) < 1.25


def test_what_grappler_replaces_and_what_copies_rows_is_not_slow(graph):
    x = tf.random.uniform((4, 8))
    assert [times_estimate((x**y).op) for y in (3.0, 0.5, 1.7)] == [1.0, 1.0, SLOW["Pow"]]
    assert times_estimate((x ** tf.random.uniform(())).op) == SLOW["Pow"]
    assert [times_estimate(y.op) for y in (x[1:], x[::2])] == [1.0, SLOW["StridedSlice"]]
