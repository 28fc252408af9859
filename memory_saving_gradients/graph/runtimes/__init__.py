"""What runs a step: TensorFlow's executor, or XLA."""
