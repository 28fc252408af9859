"""Tests of traces, of a machine with a GPU as well."""

import pytest
from tensorflow.core.framework import step_stats_pb2

from memory_saving_gradients.graph.traced import of_devices

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"


def device(name, *nodes):
    stats = [
        step_stats_pb2.NodeExecStats(node_name=node, all_end_rel_micros=micros)
        for node, micros in nodes
    ]
    return step_stats_pb2.DeviceStepStats(device=name, node_stats=stats)


def test_kernels_of_a_gpu_are_times_not_nodes():
    trace = of_devices(
        [
            device(GPU, ("conv", 5), ("relu", 3)),
            device(f"{GPU}/stream:16", ("conv:Conv2D", 400)),
            device("/device:GPU:0/stream:all", ("conv:Conv2D", 400), ("conv:Conv2D", 100)),
            device("/device:GPU:0/memcpy", ("edge_7_x:MEMCPYHtoD", 9)),
        ]
    )
    assert [node.node_name for node in trace.nodes] == ["conv", "relu"]
    assert trace.kernel_seconds == {"conv": pytest.approx(500e-6)}
