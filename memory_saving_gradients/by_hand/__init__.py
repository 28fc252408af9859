"""Parts that a user marks by `checkpoint()`: cut in two, without a plan.

Imports `pipeline` and what lies below it.
"""
