"""What is shown in a terminal or a log: progress and warnings.

Imports `planning`.
"""
