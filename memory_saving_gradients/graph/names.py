"""The names in a node's inputs: `node`, `node:1`, and `^node` for a control edge."""

from __future__ import annotations


def node_of(read: str) -> str:
    """The name of the node that an input refers to."""
    return read.removeprefix("^").partition(":")[0]


def tensor_of(read: str) -> str:
    """The name of the tensor that an input refers to: of a node alone its first output."""
    return read if ":" in read else f"{read}:0"
