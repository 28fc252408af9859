"""The functions that users call: gradients, tape, patch, max_batch.

Imports `pipeline` and what lies below it.
"""
