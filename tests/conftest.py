"""Settings that must be made before TensorFlow is loaded, and what many tests use."""

import collections
import datetime
import gc
import os

# Bit-for-bit tests need kernels without oneDNN's fusions; tests/test_onednn.py covers those.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["MEMORY_SAVING_GRADIENTS_STRICT"] = "1"
# What is tested today, in every process: see tests/strangers.
os.environ.setdefault("TEST_DAY", str(datetime.date.today().toordinal()))

import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config


def pytest_report_header():
    return f"the strangers are those of TEST_DAY={os.environ['TEST_DAY']}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `sweep(n)`, every n-th case is run; the others are slow ones."""
    seen = collections.Counter()
    for item in items:
        if marker := item.get_closest_marker("sweep"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


def pytest_collection_finish():
    # Keras collects garbage between models: what the imports made is none, and there is much of it.
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    found = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for key, value in report.user_properties
        if key == "measured"
    ]
    if not found:
        return
    from tests.strangers.measured import Measured, table

    rows = [(name, {way: Measured(**one) for way, one in ways.items()}) for name, ways in found]
    terminalreporter.section("peaks in MB: predicted, measured, share of plain, values")
    terminalreporter.write_line("\n".join(table(sorted(rows, key=lambda row: row[0]))))


@pytest.fixture
def deterministic():
    """Seeds set and kernels deterministic, as bit-for-bit comparisons need."""
    tf.config.experimental.enable_op_determinism()
    tf.random.set_seed(0)
    yield
    framework_config.disable_op_determinism()


@pytest.fixture
def graph():
    """A fresh default graph."""
    with tf.Graph().as_default() as fresh:
        yield fresh
