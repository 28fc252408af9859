"""From a graph that has been differentiated to a problem for the planners.

Imports `runtimes` and what lies below it.
"""
