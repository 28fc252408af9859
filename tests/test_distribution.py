"""Several devices and several workers, in processes of their own."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import distributed

TIMEOUT = 240  # seconds; a worker that waits for a dead one would wait for ever


def run(*jobs):
    """The results of (function, *arguments), each in a fresh process, all at once."""
    context = multiprocessing.get_context("spawn")
    started = []
    for job in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=_send, args=(theirs, *job))
        process.start()
        started.append((process, ours))
    try:
        for _, ours in started:
            assert ours.poll(TIMEOUT), "a process did not answer"
        return [ours.recv() for _, ours in started]
    finally:
        for process, _ in started:
            process.kill()  # TensorFlow's workers do not heed a polite request
            process.join()


def _send(connection, function, *arguments):
    connection.send(function(*arguments))
    connection.recv()  # a worker that ends takes the others with it


def assert_equal(ours, plain):
    assert ours[0] == plain[0]
    for a, b in zip(ours[1], plain[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_split_over_devices_keeps_them():  # gradient-checkpointing#38
    ((plain, _, _),) = run((distributed.split_by_device, False))
    ((ours, devices, plans),) = run((distributed.split_by_device, True))
    assert plans == 1
    assert [device[-5:] for device in devices] == ["CPU:0", "CPU:1"]
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_mirrored_replicas_run_in_pieces():
    ((losses, weights, _),) = run((distributed.mirrored_pieces, False))
    ((ours, own, pieces),) = run((distributed.mirrored_pieces, True))
    assert pieces == [4, 4]
    np.testing.assert_allclose(ours, losses, rtol=1e-6)
    for a, b in zip(own, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("function", [distributed.mirrored, distributed.mirrored_fit])
@pytest.mark.sweep(2)
def test_mirrored_replicas_each_save(function):
    (plain,), (ours,) = run((function, False)), run((function, True))
    assert_equal(ours, plain)
    assert len(ours[2]) % 2 == 0
    assert len(ours[2]) >= 2


def cluster():
    """Two free ports of the loopback address."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


@pytest.mark.parametrize("function", [distributed.multi_worker, distributed.multi_worker_fit])
@pytest.mark.sweep(2)
@pytest.mark.measured
def test_two_workers_each_save(function):
    outcomes = {}
    for saving in (False, True):
        workers = cluster()
        outcomes[saving] = run(*((function, saving, workers, index) for index in range(2)))
    for ours, plain in zip(outcomes[True], outcomes[False], strict=True):
        assert_equal(ours, plain)
        assert ours[2]


@pytest.mark.slow
def test_the_example_for_several_machines_runs():
    workers = cluster()
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        settings = {"TF_CONFIG": json.dumps(task), "no_proxy": "127.0.0.1"}
        command = [sys.executable, "-m", "scripts.several_machines", "--steps=4", "--batch=64"]
        processes.append(
            subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True)
        )
    printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    for text in printed:
        assert "memory: predicted peak" in text
    losses = [re.findall(r"loss ([\d.]+)", text) for text in printed]
    assert losses[0] == losses[1]
    assert float(losses[0][-1]) < float(losses[0][0])
