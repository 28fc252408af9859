"""What a user calls: gradients, tape, patch, max_batch.

Imports `pipeline` and what lies below it.
"""
