"""What a compiler allocates for a step, here or for a GPU that is described.

Imports `reading` and what lies below it.
"""
