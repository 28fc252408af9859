"""Parts that a user marks by `checkpoint()`, split by a minimum cut, without a plan.

Imports `pipeline` and what lies below it.
"""
