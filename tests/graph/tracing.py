"""What a traced run allocates."""

import tensorflow as tf

from memory_saving_gradients import measure

v1 = tf.compat.v1


def allocated(tensor, also=None):
    """The bytes that the op of `tensor` allocates in a run without graph optimisation.

    Args:
        tensor: the tensor.
        also: what to run beside.
    """
    config = v1.ConfigProto(inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    with v1.Session(config=config) as session:
        session.run(v1.global_variables_initializer())
        fetches = [tf.reduce_sum(t) for t in (tensor, also) if t is not None]
        session.run(fetches)
        events = measure.session_events(session, fetches)
    return sum(e.bytes for e in events if e.node == tensor.op.name and e.bytes > 0)
