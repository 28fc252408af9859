"""Loops whose gradients compute their rounds again."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape, get_plans, gradients
from memory_saving_gradients.graph import calls, order
from memory_saving_gradients.measure import session_peak
from memory_saving_gradients.pipeline import plan_and_rewrite
from tests.cases import assert_same
from tests.loops import FORMS, all_in_segments, lstm_cell, sequence, several, weight

v1 = tf.compat.v1


def two_steps(form, tape, jit=None):
    """Loss and gradients of two steps, the weight after them, and the plan."""
    tf.random.set_seed(3)
    w, x = weight(), sequence()

    @tf.function(jit_compile=jit)
    def step(x):
        tf.random.set_seed(5)
        with tape() as watching:
            watching.watch(x)
            loss = tf.reduce_sum(tf.sin(form(x, w)))
        by_x, by_w = watching.gradient(loss, [x, w])
        by_w = tf.convert_to_tensor(by_w)
        w.assign_sub(0.1 * by_w)
        return [t for t in (loss, by_x, by_w) if t is not None]

    made = [t.numpy() for _ in range(2) for t in step(x)]
    return [*made, w.numpy()], get_plans(step.get_concrete_function(x).graph)


by_memory = functools.partial(GradientTape, checkpoints="memory")


@functools.cache
def plainly(name, jit=None):
    return two_steps(FORMS[name], tf.GradientTape, jit)[0]


@pytest.fixture
def in_segments(monkeypatch):
    """Has all loops run in segments: see `all_in_segments`."""

    def of(every, some=False, within=0):
        monkeypatch.setattr(plan_and_rewrite, "choose", all_in_segments(every, some, within))

    return of


# Their sums of three terms are equal to rounding; a loop in a branch is of another step.
ROUNDED, IN_BRANCHES = {"long_sum", "long_sum_inside"}, {"in_a_branch"}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("every", "some", "within"),
    [
        (1, False, 0),
        (3, True, 0),
        (1, True, 0),
        (50, False, 0),
        (3, False, 0),
        (5, False, 2),
        (4, True, 3),
    ],
)
@pytest.mark.parametrize("name", sorted(FORMS.keys() - IN_BRANCHES))
@pytest.mark.sweep(7)
def test_gradients_are_equal(name, every, some, within, in_segments):
    in_segments(every, some, within)
    made, plans = two_steps(FORMS[name], by_memory)
    assert plans, "nothing was rewritten"
    assert {(each.every, each.within) for each in plans[-1].loops if not each.why} == {
        (every, within)
    }
    for ours, plain in zip(made, plainly(name), strict=True):
        if name in ROUNDED:
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(ours, plain)
    assert bool(plans[-1].labels.reordered) == (name in ROUNDED)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_popped_has_no_name_of_a_copy(every, in_segments):
    in_segments(every, some="DynamicPartition:1")
    made, plans = two_steps(FORMS["several_outputs"], by_memory)
    assert plans[-1].loops[0].kept
    assert_same(made, plainly("several_outputs"))


@pytest.fixture
def without_grappler():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.usefixtures("deterministic", "without_grappler")
@pytest.mark.parametrize("every", [1, 3])
def test_plain_gradients_of_loops_do_not_run_without_grappler(every, in_segments):
    in_segments(every)
    made, plans = two_steps(FORMS["lstm"], by_memory)
    assert plans[-1].loops
    assert_same(made, two_steps(FORMS["lstm"], tf.GradientTape)[0])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("every", "within"), [(1, 0), (3, 0), (5, 2)])
@pytest.mark.parametrize("name", ["scan", "lstm"])
@pytest.mark.sweep(2)
def test_gradients_are_equal_to_rounding_under_xla(name, every, within, in_segments):
    in_segments(every, within=within)
    made, plans = two_steps(FORMS[name], by_memory, jit=True)
    assert plans[-1].loops
    for ours, plain in zip(made, plainly(name, jit=True), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5 * np.abs(plain).max())


ROWS, WIDTH = 64, 32


def network(steps, rows=ROWS, cell=lstm_cell):
    """A loss of a recurrent network, what to differentiate by, and what to feed; `steps` or None.

    Its sequence is fed, so that a graph serves any number of steps where that is None.
    """
    random = np.random.RandomState(0)
    x = v1.placeholder(tf.float32, (steps, rows, WIDTH), "x")
    w = tf.constant(random.randn(WIDTH, 4 * WIDTH).astype("f") * 0.2)
    read = tf.TensorArray(tf.float32, tf.shape(x)[0]).unstack(x)

    def body(i, h, c):
        return i + 1, *cell(h, c, read.read(i), w)

    begin = tf.zeros((rows, WIDTH))
    _, h, _ = tf.while_loop(lambda i, *_: i < tf.shape(x)[0], body, (0, begin, begin))
    return tf.reduce_sum(h**2), [x, w], x, random


def run(differentiate, steps, fed=None, **options):
    """Loss and gradients for sequences of so many steps, the peak of the last, and the plan."""
    with tf.Graph().as_default() as graph:
        loss, xs, x, random = network(steps)
        grads = differentiate(loss, xs, **options)
        made = []
        config = v1.ConfigProto(inter_op_parallelism_threads=1)
        with v1.Session(config=config) as session:
            for length in fed or [steps]:
                values = {x: random.randn(length, *x.shape[1:]).astype("f")}
                made += session.run([loss, *grads], values)
            peak = session_peak(session, grads, values)
        plans = get_plans(graph)
        return made, peak, plans[-1] if plans else None


@pytest.mark.measured
def test_memory_grows_with_the_square_root_of_the_rounds():
    few, many = 32, 512
    plain = [run(tf.gradients, steps)[1] for steps in (few, many)]
    ours = [run(gradients, steps, checkpoints="memory") for steps in (few, many)]
    outside = [2 * steps * ROWS * WIDTH * 4 for steps in (few, many)]  # the sequence, its gradient
    assert plain[1] > 15 * plain[0]
    assert ours[1][1] - outside[1] < 6 * (ours[0][1] - outside[0])
    assert plain[1] > 3.5 * ours[1][1]
    assert ours[1][1] < 1.25 * ours[1][2].peak_bytes  # as predicted


@pytest.mark.measured
@pytest.mark.parametrize("name", ["branch_inside", "loop_inside", "lstm", "scan"])
def test_a_loop_takes_no_more_than_predicted(name, monkeypatch):
    steps, rows, width = 96, 64, 96
    monkeypatch.setattr("tests.loops.STEPS", steps)
    random = np.random.RandomState(2)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (steps, rows, width))
        w = tf.constant(random.randn(width, width).astype("f") * 0.1)
        grads = gradients(tf.reduce_sum(FORMS[name](x, w)), [w], checkpoints="memory")
        with v1.Session() as session:
            fed = {x: random.randn(*x.shape).astype("f")}
            session.run(grads, fed)
            peak = session_peak(session, grads, fed)
        (plan,) = get_plans(graph)
    assert peak < 1.15 * plan.peak_bytes
    assert peak < 0.3 * plan.baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
@pytest.mark.measured
def test_a_budget_below_two_levels_runs_segments_in_shorter_ones():
    steps = 2000
    plain, *_ = run(tf.gradients, steps)
    _, least, by_two = run(gradients, steps, checkpoints="memory")
    outside = 2 * steps * ROWS * WIDTH * 4  # the sequence, its gradient
    ours, peak, plan = run(gradients, steps, memory_budget=(by_two.peak_bytes + outside) // 2)
    assert [loop.within > 0 for loop in plan.loops] == [True]
    assert_same(ours, plain)
    assert peak < 1.1 * plan.peak_bytes
    assert peak - outside < 0.7 * (least - outside)
    with pytest.raises(BudgetError):
        run(gradients, steps, memory_budget=plan.peak_bytes, max_recompute=1)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("within", [0, 2, 3])
def test_any_number_of_rounds_in_segments_of_five(within, in_segments):
    lengths = [0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 31]
    in_segments(5, within=within)
    assert_same(
        run(gradients, None, lengths, checkpoints="memory")[0],
        run(tf.gradients, None, lengths)[0],
    )


@pytest.mark.usefixtures("deterministic")
def test_rounds_that_only_a_run_tells():
    lengths = [0, 1, 2, 3, 11, 12, 13, 100]
    plain, _, _ = run(tf.gradients, None, lengths)
    ours, _, plan = run(gradients, None, lengths, checkpoints="memory")
    assert plan.loops
    assert_same(ours, plain)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": 0.5},
        {"memory_budget": 0.35},
        {"max_overhead": 0.5},
        {"checkpoints": "auto"},
    ],
)
def test_who_plans_loops(options):
    plain, before, _ = run(tf.gradients, 256)
    ours, peak, plan = run(gradients, 256, **options)
    assert {op.name for op in plan.problem.ops if op.again} == {loop.name for loop in plan.loops}
    assert_same(ours, plain)
    assert peak < before * options.get("memory_budget", 0.5) * 1.1
    assert plan.overhead < options.get("max_overhead", 0.6)
    (loop,) = plan.loops
    assert (loop.every == 1) == (
        options.get("memory_budget") == 0.5
    )  # it takes less time, if it fits


@pytest.mark.parametrize(("asked", "run_at_once"), [(1, 1), (10, 4)])
def test_single_rounds_overlap_only_if_those_of_the_loop_may(asked, run_at_once, in_segments):
    """With one at a time, a loop draws its random numbers in order."""
    in_segments(1)
    with tf.Graph().as_default():
        x = tf.ones((4, 8))
        h = tf.while_loop(
            lambda i, h: i < 9,
            lambda i, h: (i + 1, tf.sin(h) * x),
            (0, x),
            parallel_iterations=asked,
        )
        (grad,) = gradients(tf.reduce_sum(h[1]), [x], checkpoints="memory")
        loops = [op for op in order.needed([grad.op]) if op.type in calls.LOOPS]
    assert [op.get_attr("parallel_iterations") for op in loops] == 2 * [run_at_once]


def one_product(h, c, x, w):
    a, b, d, o = tf.split((h + x) @ w, 4, axis=1)
    return tf.sigmoid(a) * tf.tanh(b) * h, tf.sigmoid(d) * c + o


def test_rounds_that_run_at_once_add_to_the_gradient_of_a_weight_in_turn(in_segments):
    in_segments(3)
    with tf.Graph().as_default():
        loss, xs, _, _ = network(12, cell=one_product)
        grads = gradients(loss, xs, checkpoints="memory")
        (gradient,) = (op for op in order.needed([grads[1].op]) if "recomputing" in op.name)
        (body,) = calls.bodies(gradient)
        products = [
            term.op
            for op in calls.flattened(body)
            if op.type == "AddN" and op.outputs[0].shape == xs[1].shape
            for term in op.inputs
            if term.op.type == "MatMul"
        ]
        assert products
        assert all(op.control_inputs for op in products)


def products(differentiate, **options):
    """How many matrix products the rounds of the loops of a step compute."""
    with tf.Graph().as_default():
        loss, xs, *_ = network(256)
        grads = differentiate(loss, xs, **options)
        loops = (op for op in order.needed([loss.op, *(t.op for t in grads)]) if calls.bodies(op))
        return sum(
            op.type == "MatMul" for loop in loops for op in calls.flattened(*calls.bodies(loop))
        )


@pytest.mark.usefixtures("deterministic")
def test_speed_recomputes_no_product():
    plain, before, _ = run(tf.gradients, 256)
    assert products(gradients, checkpoints="speed") == products(tf.gradients)
    ours, peak, plan = run(gradients, 256, checkpoints="speed")
    assert_same(ours, plain)
    assert peak < 0.75 * before
    (loop,) = plan.loops
    assert len(loop.kept) == 4  # of the cell its gates


def test_who_leaves_loops_alone():
    _, _, plan = run(gradients, 64, max_overhead=0.001)
    assert plan is None or not any(loop.every for loop in plan.loops)


def test_a_plan_of_loops_is_saved_and_applied(tmp_path):
    _, peak, plan = run(gradients, 256, checkpoints="memory")
    plan.save(tmp_path / "plan.json")
    _, again, other = run(gradients, 256, plan=tmp_path / "plan.json")
    assert other.loops == plan.loops
    assert again == pytest.approx(peak, rel=0.05)


def test_a_budget_that_no_loop_keeps_names_the_lowest_peak():
    with pytest.raises(BudgetError) as caught:
        run(gradients, 256, memory_budget=0.01)
    _, peak, _ = run(gradients, 256, checkpoints="memory")
    assert caught.value.lowest_peak_bytes < 2 * peak


@pytest.mark.usefixtures("deterministic")
def test_a_way_that_misses_the_budget_is_undone_and_the_next_one_taken(monkeypatch):
    plain, before, _ = run(tf.gradients, 256)

    def choose(*asked):
        return [*all_in_segments(1, some=True)(*asked), *all_in_segments(16)(*asked)]

    monkeypatch.setattr(plan_and_rewrite, "choose", choose)
    ours, peak, plan = run(gradients, 256, memory_budget=0.35)
    assert [loop.every for loop in plan.loops] == [16]
    assert_same(ours, plain)
    assert peak < 0.4 * before


@pytest.mark.usefixtures("deterministic")
def test_exact_sums_leave_a_loop_plain():
    exact = functools.partial(by_memory, running_sums=False)
    made, plans = two_steps(FORMS["long_sum"], exact)
    assert not plans
    assert_same(made, plainly("long_sum"))


def test_the_warning_says_why_a_loop_stays_plain():
    says = "the loop mine keeps most of these for its gradient.*: its sum mine/add"
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, (64, ROWS, WIDTH), "x")
        w = tf.ones((WIDTH, WIDTH))

        def body(i, h):
            return i + 1, tf.tanh(several(h @ w) + x[0])

        h = tf.while_loop(lambda i, _: i < 64, body, (0, x[1]), name="mine")[1]
        with pytest.warns(UserWarning, match=says):
            gradients(tf.reduce_sum(h), [w], checkpoints="memory", running_sums=False)


@pytest.mark.usefixtures("deterministic")
def test_an_error_leaves_the_loop_as_it_was(monkeypatch):
    def fail(*_):
        raise RuntimeError("a fault")

    plain, _, _ = run(tf.gradients, 64)
    monkeypatch.delenv("MEMORY_SAVING_GRADIENTS_STRICT", raising=False)
    monkeypatch.setattr(plan_and_rewrite, "apply", fail)
    monkeypatch.setattr(plan_and_rewrite, "plain", fail)
    with pytest.warns(UserWarning, match="a fault"):
        ours, _, plan = run(gradients, 64, checkpoints="memory")
    assert plan is None
    assert_same(ours, plain)


@pytest.mark.usefixtures("deterministic")
def test_gradients_of_gradients():
    def twice(differentiate):
        with tf.Graph().as_default():
            loss, (x, w), fed, random = network(12, rows=4)
            (first,) = differentiate(loss, [w])
            second = differentiate(tf.reduce_sum(first**2), [w, x])
            with v1.Session() as session:
                return session.run([first, *second], {fed: random.randn(12, 4, WIDTH)})

    ours = twice(functools.partial(gradients, checkpoints="memory"))
    for mine, plain in zip(ours, twice(tf.gradients), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("deterministic")
def test_a_loop_in_a_branch():
    def of(differentiate):
        with tf.Graph().as_default():
            random = np.random.RandomState(1)
            x = tf.constant(random.randn(200, 64, 32).astype("f"))
            w = tf.constant(random.randn(32, 32).astype("f") * 0.2)

            def body(i, h):
                return i + 1, tf.tanh(several(h @ w) @ w)

            def loop():
                return tf.while_loop(lambda i, _: i < 200, body, (0, x[0]))[1]

            h = tf.cond(tf.reduce_sum(x) < 1e6, loop, lambda: x[0])
            grads = differentiate(tf.reduce_sum(tf.sin(h)), [x, w])
            with v1.Session() as session:
                return session.run(grads), session_peak(session, grads)

    plain, before = of(tf.gradients)
    ours, peak = of(functools.partial(gradients, checkpoints="memory"))
    assert_same(ours, plain)
    assert before > 3 * peak


@pytest.mark.usefixtures("deterministic")
def test_a_saved_step_keeps_its_segments(tmp_path, in_segments):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = weight()

        @tf.function
        def step(self, x):
            with by_memory() as tape:
                loss = tf.reduce_sum(FORMS["while_loop"](x, self.w))
            return tape.gradient(loss, self.w)

    in_segments(3)
    module, x = Module(), sequence()
    made = module.step(x)
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    np.testing.assert_allclose(loaded.step(x), made, rtol=1e-5)  # a plain one differs by as much
    library = loaded.step.get_concrete_function(x).graph.as_graph_def().library
    names = {node.name for function in library.function for node in function.node_def}
    assert {"segment", "segment_grad"} <= {
        name.rpartition("_")[0] or name for name in names
    } | names


@pytest.mark.usefixtures("deterministic")
def test_a_loop_whose_gradient_is_given():
    """Nothing then tells the lists that it keeps for its gradient from the backward pass."""
    x, counter = tf.cast(tf.constant(np.random.RandomState(3).randn(32, 32)), tf.float32), weight()

    def step(tape):
        @tf.function
        def step(x):
            with tape() as watching:
                watching.watch(x)
                body = lambda i, h: (i + 1, tf.sin(h @ x))  # noqa: E731
                _, y = tf.while_loop(lambda i, h: i < 40, body, (0, x))
                counter.assign_add(counter * 0.0)
                metric = tf.reduce_mean(tf.sign(y) * tf.fill(x.shape, counter[0, 0]))
            return metric, watching.gradient(y, x, tf.cos(x))

        return [t.numpy() for t in step(x)], get_plans(step.get_concrete_function(x).graph)

    plain, _ = step(tf.GradientTape)
    ours, plans = step(by_memory)
    assert plans[-1].loops
    assert_same(ours, plain)


def test_loops_that_read_variables_are_measured():
    w, x = weight(), sequence()

    @tf.function
    def step(x):
        with GradientTape(checkpoints="memory", verify=True) as tape:
            loss = tf.reduce_sum(FORMS["lstm"](x, w))
        return tape.gradient(loss, w)

    plan = get_plans(step.get_concrete_function(x).graph)[-1]
    assert plan.loops
    assert 0 < plan.measured_peak_bytes < plan.baseline_peak_bytes


@pytest.mark.usefixtures("deterministic")
def test_a_loop_that_runs_again_as_a_whole_hands_on_the_right_lists():
    """The results of its rounds are in a list that is stacked, and in one for the gradient."""

    def step(differentiate):
        with tf.Graph().as_default() as graph:
            x, w = sequence(), tf.constant(np.random.RandomState(2).randn(8, 8) * 0.4)
            w, start = tf.cast(w, tf.float32), tf.sin(x)
            later = tf.exp(tf.scan(lambda h, now: tf.tanh(h @ w + now), start, x[0]))
            kept = tf.tanh(later @ w)
            grads = differentiate(tf.reduce_sum(tf.sin(kept @ w)), [x, w], [start, kept])
            copies = [op for op in graph.get_operations() if op.name.endswith("/recomputed")]
            with v1.Session() as session:
                return session.run(grads), any(op.type.endswith("While") for op in copies)

    plain, _ = step(lambda loss, xs, kept: tf.gradients(loss, xs))
    ours, runs_again = step(lambda loss, xs, kept: gradients(loss, xs, checkpoints=kept))
    assert runs_again
    assert_same(ours, plain)
