"""What a traced run allocates."""

import tensorflow as tf

from memory_saving_gradients import measure

v1 = tf.compat.v1


def allocated(tensor):
    """The bytes that the op of `tensor` allocates in a run without graph optimisation."""
    config = v1.ConfigProto(inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    with v1.Session(config=config) as session:
        events = measure.session_events(session, tf.reduce_sum(tensor))
    return sum(e.bytes for e in events if e.node == tensor.op.name and e.bytes > 0)
