"""What a step takes when it runs: scratch space, fusion, buffers, the order of execution.

Imports `graph` and what lies below it.
"""
