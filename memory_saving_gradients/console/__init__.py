"""Output in a terminal or a log: progress, warnings, the first plan.

Imports `planning`.
"""
