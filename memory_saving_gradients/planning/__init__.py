"""The step as data, and the search for schedules; numpy and numba, never TensorFlow.

Imports nothing of the package.
"""
