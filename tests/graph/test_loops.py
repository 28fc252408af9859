"""What is known of a loop and its gradient."""

import pytest
import tensorflow as tf

from memory_saving_gradients.graph.loops import gradients_of_loops, pair_of
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


@pytest.mark.parametrize("writes", [False, True])
def test_a_loop_inside_runs_again_unless_it_writes_a_variable(writes):
    seen = tf.Variable(0.0)

    def form(x, w):
        def inner(j, g):
            if writes:
                seen.assign_add(1.0)
            return j + 1, several(g @ w)

        def body(i, h):
            h = tf.while_loop(lambda j, _: j < 3, inner, (0, h))[1]
            return i + 1, tf.tanh(h)

        return tf.while_loop(lambda i, _: i < 5, body, (0, x[0]))[1]

    both, _ = loop_of(form)
    pair = pair_of(*both)
    inside = {i for i, t in pair.elements.items() if t.op.type == "While"}
    assert inside
    assert inside.isdisjoint(pair.able) == writes


def test_a_list_that_somebody_else_reads_is_left_alone():
    """Only what the gradient alone pops may go."""
    both, (graph, _) = loop_of(FORMS["while_loop"])
    before = pair_of(*both)
    forward = before.forward
    with graph.as_default():
        tf.raw_ops.TensorListLength(input_handle=forward.outputs[before.able[0]])
    assert set(pair_of(*both).able) == set(before.able[1:])


@pytest.mark.parametrize("name", ["while_loop", "long_sum", "long_sum_inside"])
def test_which_sums_are_equal_to_rounding(name):
    both, _ = loop_of(FORMS[name])
    assert bool(pair_of(*both).sums) == (name != "while_loop")
