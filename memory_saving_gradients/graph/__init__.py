"""Facts of TensorFlow's graphs, op by op, and the edits that they allow.

Imports `planning`.
"""
