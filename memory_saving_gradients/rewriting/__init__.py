"""From a schedule to edits of the graph, and how copies are made to wait.

Imports `reading` and what lies below it.
"""
