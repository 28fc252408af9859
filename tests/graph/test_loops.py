"""What is known of a loop and its gradient."""

import pytest
import tensorflow as tf

from memory_saving_gradients.graph.loops import StaysPlain, gradients_of_loops, pair_of
from tests.loops import FORMS, sequence, several, weight


def loop_of(form):
    """A loop and its gradient, and what keeps their graph alive."""
    w = weight()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(form(x, w)))
        return tape.gradient(loss, w)

    graph = step.get_concrete_function(sequence()).graph
    ((backward, forward),) = gradients_of_loops(graph.get_operations()).items()
    return (forward, backward), (graph, w)


def test_a_cell_begins_with_its_state():
    both, _ = loop_of(FORMS["lstm"])
    pair = pair_of(*both)
    variables = [
        pair.body.inputs[i] for i in pair.way(1).start.states if pair.body.inputs[i].shape.rank
    ]
    assert len(variables) == 2  # h and c
    assert pair.way(1).start.once == ()
    assert set(pair.able) <= set(pair.popped.values())


def test_a_mask_is_kept_and_not_the_random_numbers():
    both, _ = loop_of(FORMS["dropout"])
    pair = pair_of(*both)
    assert pair.way(1).start.once == ()
    kept = set(pair.popped.values()) - set(pair.able)
    assert [pair.elements[i].dtype for i in kept] == [tf.bool]


def test_a_loop_inside_that_reads_a_variable_stays_plain():
    def form(x, w):
        def body(i, h):
            inner = tf.while_loop(lambda j, _: j < 3, lambda j, g: (j + 1, several(g @ w)), (0, h))
            return i + 1, tf.tanh(inner[1])

        return tf.while_loop(lambda i, _: i < 5, body, (0, x[0]))[1]

    both, _ = loop_of(form)
    with pytest.raises(StaysPlain, match="reads variables"):
        pair_of(*both)


def test_a_list_that_somebody_else_reads_is_left_alone():
    """Only what the gradient alone pops may go."""
    both, (graph, _) = loop_of(FORMS["while_loop"])
    before = pair_of(*both)
    forward = before.forward
    with graph.as_default():
        tf.raw_ops.TensorListLength(input_handle=forward.outputs[before.able[0]])
    assert set(pair_of(*both).able) == set(before.able[1:])


@pytest.mark.parametrize("name", ["while_loop", "long_sum"])
def test_which_sums_are_equal_to_rounding(name):
    both, _ = loop_of(FORMS[name])
    assert bool(pair_of(*both).sums) == (name == "long_sum")
