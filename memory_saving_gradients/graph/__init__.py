"""The only rooms that know `tf.Graph`."""
