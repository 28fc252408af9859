"""Loops of many forms: each a function of a sequence (STEPS, ROWS, WIDTH) and a square weight."""

import numpy as np
import tensorflow as tf

STEPS, ROWS, WIDTH = 11, 4, 8


def sequence():
    return tf.constant(np.random.RandomState(1).randn(STEPS, ROWS, WIDTH).astype("f"))


def weight():
    return tf.Variable((np.random.RandomState(2).randn(WIDTH, WIDTH) * 0.4).astype("f"))


def all_in_segments(every, some=False, within=0):
    """A choice for all loops: segments of so many rounds that keep every other element, or none.

    `some` may also name an element to keep, without the name of the loop. With `within` they run
    again in segments of so many rounds.
    """

    def choose(loops, reading, request):
        kept = {pair: [pair.elements[i].name for i in pair.able] for pair in loops.sizes}
        if isinstance(some, str):
            found = {pair: [n for n in kept[pair] if n.endswith(f"/{some}")] for pair in kept}
        else:
            found = {pair: kept[pair][::2] if some else () for pair in kept}
        ways = {pair: pair.way(every, found[pair], within) for pair in kept}
        return [loops.plans(ways)] if ways else []

    return choose


def several(z):
    """An activation whose gradient reads a few tensors."""
    return tf.sin(z) * tf.cos(z) + tf.sigmoid(z)


def _rounds(body, *begin, rounds=None, **options):
    """What a loop of so many rounds makes; the first loop variable counts them."""
    rounds = STEPS if rounds is None else rounds
    return tf.while_loop(lambda i, *_: i < rounds, body, [0, *begin], **options)[1]


def while_loop(x, w):
    return _rounds(lambda i, h: (i + 1, tf.tanh(several(h @ w) @ w)), x[0])


def autograph_range(x, w):
    h = x[0]
    for i in tf.range(tf.shape(x)[0]):
        h = tf.tanh(several(h @ w) @ w + x[i])
    return h


def autograph_break_and_continue(x, w):
    h = x[0]
    for step in x:
        h = tf.tanh(several(h @ w) @ w + step)
        if tf.reduce_sum(h) > 5.0:
            break
        if tf.reduce_sum(h) < -3.0:
            continue
        h = h * 1.1
    return h


def scan(x, w):
    return tf.scan(lambda h, step: tf.tanh(several(h @ w) @ w + step), x, x[0])


def scan_in_reverse(x, w):
    return tf.scan(lambda h, step: tf.tanh(several(h @ w) @ w + step), x, x[0], reverse=True)


def map_fn(x, w):
    return tf.map_fn(lambda step: tf.tanh(several(step @ w)), x)


def foldl(x, w):
    return tf.foldl(lambda h, step: tf.tanh(several(h @ w) @ w + step), x, x[0])


def branch_inside(x, w):
    def body(i, h):
        high = tf.reduce_sum(h) > 0
        return i + 1, tf.cond(high, lambda: tf.tanh(several(h @ w)), lambda: tf.cos(h + x[i]))

    return _rounds(body, x[0])


def loop_inside(x, w):
    w = tf.identity(w)

    def body(i, h):
        inner = _rounds(lambda j, g: (j + 1, tf.sin(several(g @ w))), h, rounds=3)
        return i + 1, tf.tanh(inner + x[i])

    return _rounds(body, x[0])


def loops_that_read(x, w):
    """A loop in a loop in a loop; each reads the variable."""

    def body(i, h):
        def inner(j, g):
            innermost = _rounds(lambda k, f: (k + 1, tf.tanh(f @ w)), g, rounds=2)
            return j + 1, tf.sin(several(g @ w)) * innermost

        return i + 1, tf.tanh(_rounds(inner, h, rounds=3) @ w + x[i])

    return _rounds(body, x[0])


def functions_that_read(x, w):
    """A branch and a call in a loop; each reads the variable."""
    inner = tf.function(lambda h: tf.tanh(several(h @ w)))

    def body(i, h):
        high = tf.reduce_sum(h) > 0
        h = tf.cond(high, lambda: tf.tanh(inner(h) @ w), lambda: tf.cos(h @ w + x[i]))
        return i + 1, inner(h)

    return _rounds(body, x[0])


def dropout(x, w):
    """Rounds that run ahead would draw in any order."""

    def body(i, h):
        return i + 1, tf.nn.dropout(tf.tanh(several(h @ w)) + x[i], 0.4)

    return _rounds(body, x[0], parallel_iterations=1)


def embedding(x, w):
    def body(i, h):
        rows = tf.gather(w, [i % WIDTH, (i * 3) % WIDTH, 0, 1])
        return i + 1, tf.tanh(several(h) * rows)

    return _rounds(body, x[0])


def table(x, w):
    """Rows of a tensor: its gradients are sparse."""
    return embedding(x, w * 1.0)


def reads_what_it_wrote(x, w):
    """The list is part of the state."""
    written = tf.TensorArray(tf.float32, STEPS + 2, clear_after_read=False)
    written = written.write(0, x[0]).write(1, x[1])

    def body(i, written):
        new = tf.tanh(several(written.read(i) @ w) @ w + written.read(i + 1))
        return i + 1, written.write(i + 2, new)

    return _rounds(body, written).stack()


def stop_gradient(x, w):
    def body(i, h, sums):
        return i + 1, tf.tanh(several(h @ w)) + tf.stop_gradient(sums), sums + h

    return _rounds(body, x[0], x[1])


def growing(x, w):
    def body(i, h):
        return i + 1, tf.concat([h, tf.tanh(several(h[-1:] @ w))], 0)

    shapes = [tf.TensorShape([]), tf.TensorShape([None, WIDTH])]
    return _rounds(body, x[0], shape_invariants=shapes)


def call_inside(x, w):
    inner = tf.function(lambda h: tf.tanh(several(h @ w)))
    return _rounds(lambda i, h: (i + 1, inner(h) + x[i]), x[0])


def custom_gradient(x, w):
    @tf.custom_gradient
    def activation(z):
        y = tf.tanh(z)
        return y, lambda upstream: upstream * (1 - y * y) * 0.5

    return _rounds(lambda i, h: (i + 1, activation(several(h @ w))), x[0])


def max_pooling(x, w):
    """Windows that overlap, as the order of sums in its gradient depends on its kernel."""

    def body(i, h):
        image = tf.reshape(tf.abs(tf.sin(h @ w)), [1, 4, 4, 2])
        pooled = tf.nn.max_pool(image, 3, 1, "SAME")
        return i + 1, tf.reshape(pooled, [ROWS, WIDTH]) * tf.cos(x[i])

    return _rounds(body, x[0])


def several_outputs(x, w):
    """Ops of several outputs, of which some may be kept."""

    def body(i, h):
        for _ in range(3):
            rows = tf.cast(h[:, 0] > 0, tf.int32)
            parts = tf.dynamic_partition(tf.sin(h @ w), rows, 2)
            indices = tf.dynamic_partition(tf.range(ROWS), rows, 2)
            stitched = tf.dynamic_stitch(indices, [tf.tanh(parts[0]), tf.cos(parts[1])])
            h = tf.ensure_shape(stitched, [ROWS, WIDTH])
        return i + 1, h * x[i]

    return _rounds(body, x[0])


def long_sum_inside(x, w):
    def body(i, h):
        def inner(j, g):
            return j + 1, tf.tanh(g @ w + several(g))

        return i + 1, _rounds(inner, h, rounds=2) * x[i]

    return _rounds(body, x[0])


def no_rounds(x, w):
    none = tf.cast(tf.reduce_sum(x) * 0, tf.int32)
    return _rounds(lambda i, h: (i + 1, tf.tanh(several(h @ w))), x[0], rounds=none)


def long_sum(x, w):
    """Grappler makes one `AddN` of its sums, whose order depends on who holds the terms."""
    return _rounds(lambda i, h: (i + 1, tf.tanh(several(h @ w) + x[i])), x[0])


def in_a_branch(x, w):
    w = tf.identity(w)
    return tf.cond(tf.reduce_sum(x) < 1e6, lambda: while_loop(x, w), lambda: x[0])


def lstm_cell(h, c, step, w):
    a, b, d, o = tf.split(h @ w + step @ w, 4, axis=1)
    c = tf.sigmoid(b) * c + tf.sigmoid(a) * tf.tanh(d)
    return tf.sigmoid(o) * tf.tanh(c), c


def lstm(x, w):
    wide = tf.concat([w, w * 0.5, -w, w * 2.0], 1)

    def body(i, h, c):
        return i + 1, *lstm_cell(h, c, x[i], wide)

    return _rounds(body, x[0], x[1], maximum_iterations=STEPS)


#: All of them, by name.
FORMS = {
    form.__name__: form
    for form in (
        while_loop,
        autograph_range,
        autograph_break_and_continue,
        scan,
        scan_in_reverse,
        map_fn,
        foldl,
        branch_inside,
        loop_inside,
        loops_that_read,
        functions_that_read,
        dropout,
        embedding,
        table,
        reads_what_it_wrote,
        stop_gradient,
        growing,
        call_inside,
        custom_gradient,
        no_rounds,
        long_sum,
        long_sum_inside,
        max_pooling,
        several_outputs,
        in_a_branch,
        lstm,
    )
}
