"""From a schedule to edits of the graph, and how copies are delayed.

Imports `reading` and what lies below it.
"""
