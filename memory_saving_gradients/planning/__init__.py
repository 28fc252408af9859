"""Planning: from a problem to a schedule. Imports nothing of TensorFlow."""
