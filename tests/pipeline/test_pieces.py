"""`pieces=`, as users call it: the bytes that a run takes, its values, its plans, its errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from memory_saving_gradients import BudgetError, GradientTape, Plan, get_plans, gradients, measure
from memory_saving_gradients.keras import get_plans as plans_of_model
from memory_saving_gradients.keras import save_memory

v1 = tf.compat.v1

ROWS, WIDTH, WORDS = 1024, 64, 4000
LOGITS = 4 * ROWS * WORDS


class Head:
    """A layer, and the loss of a language model after it, differentiated in some way."""

    def __init__(self, differentiate, batch=ROWS):
        random = np.random.default_rng(0)
        with tf.Graph().as_default() as self.graph:
            x = v1.placeholder(tf.float32, (batch, WIDTH))
            labels = v1.placeholder(tf.int64, (batch,))
            first, last = (
                v1.get_variable(
                    name,
                    initializer=random.standard_normal(shape).astype(np.float32) * 0.1,
                    use_resource=True,
                )
                for name, shape in (("first", (WIDTH, WIDTH)), ("last", (WIDTH, WORDS)))
            )
            logits = tf.tanh(x @ first) @ last
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
            self.right = tf.reduce_mean(
                tf.cast(tf.equal(tf.argmax(logits, -1), labels), tf.float32)
            )
            self.fetches = [loss, *differentiate(loss, [x, first, last])]
            self.session = v1.Session()
            self.session.run(v1.global_variables_initializer())
        self.plan = next(iter(get_plans(self.graph)), None)
        fed = random.standard_normal((ROWS, WIDTH)), random.integers(0, WORDS, ROWS)
        self.feed = dict(zip((x, labels), fed, strict=True))

    def run(self, fetches=None):
        return self.session.run(self.fetches if fetches is None else fetches, self.feed)

    def peak(self):
        self.run()
        return measure.session_peak(self.session, self.fetches, self.feed)


def by(**options):
    return lambda *args: gradients(*args, checkpoints="memory", **options)


def assert_close(ours, plain):
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.fixture(scope="module")
def plain():
    return Head(tf.gradients)


@pytest.mark.parametrize("options", [{"pieces": True}, {"pieces": 8}, {"batch_size": ROWS}])
def test_logits_are_never_whole(plain, options):
    unknown = "batch_size" in options
    ours = Head(by(**{"pieces": True, **options}), None if unknown else ROWS)
    (region,) = [one for one in ours.plan.pieces if one.pieces > 1]
    assert (region.bytes, region.at_once) == (LOGITS, True)
    assert plain.peak() > LOGITS
    assert ours.peak() < 0.5 * LOGITS
    assert ours.peak() == pytest.approx(ours.plan.peak_bytes, rel=0.1)
    assert_close(ours.run(), plain.run())
    assert ours.run(ours.right) == plain.run(plain.right)
    assert "1 region in pieces" in str(ours.plan)


def test_a_budget_uses_pieces_only_where_it_has_to(plain):
    wide = Head(by(memory_budget=0.99, pieces=True))
    assert not [one for one in wide.plan.pieces if one.pieces > 1]
    with pytest.raises(BudgetError, match="pieces=True"):
        Head(by(memory_budget=0.4))
    ours = Head(by(memory_budget=0.4, pieces=True))
    assert [one.pieces for one in ours.plan.pieces if one.pieces > 1] == [4]
    assert ours.peak() <= ours.plan.budget_bytes
    with pytest.raises(BudgetError) as error:
        Head(by(memory_budget="1MB", pieces=True))
    assert error.value.lowest_peak_bytes < 0.3 * LOGITS


def test_off_by_default():
    assert Head(by()).plan is None or not Head(by()).plan.pieces


def test_a_saved_plan_gives_the_same_pieces(tmp_path, plain):
    made = Head(by(pieces=True))
    made.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.pieces == made.plan.pieces
    again = Head(lambda *args: gradients(*args, plan=tmp_path / "plan.json"))
    assert again.plan.problem == made.plan.problem
    assert again.peak() == pytest.approx(made.peak(), rel=0.01)


def test_a_graph_differentiated_again_is_plain_and_right(plain):
    def twice(loss, xs):
        gradients(loss, xs, checkpoints="memory", pieces=4)
        return tf.gradients(loss, xs)

    assert_close(Head(twice).run(), plain.run())


def test_gradients_of_gradients():
    def second(differentiate):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, (64, 16))
            y = tf.nn.log_softmax(tf.tanh(x) @ tf.ones((16, 400)) * tf.range(400.0))
            (first,) = differentiate(tf.reduce_sum(tf.square(y)), [x])
            (second,) = differentiate(tf.reduce_sum(tf.square(first)), [x])
            with v1.Session() as session:
                return session.run(second, {x: np.linspace(0, 0.01, 64 * 16).reshape(64, 16)})

    ours, theirs = second(by(pieces=4)), second(tf.gradients)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_summary_shows_each_region(capsys):
    Head(by(pieces=8)).plan.summary()
    shown = capsys.readouterr().out
    assert "In pieces" in shown
    assert "1,024" in shown


@pytest.mark.parametrize(
    ("pieces", "error"), [("4", TypeError), (2.0, TypeError), (-1, ValueError), (1, ValueError)]
)
def test_wrong_numbers(pieces, error):
    with pytest.raises(error, match="pieces"):
        Head(by(pieces=pieces))


def language_model(head=None, mask=False, loss=None, **compiled):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,), dtype="int32")
    h = keras.layers.Embedding(2000, 32, mask_zero=mask)(inputs)
    h += keras.layers.MultiHeadAttention(4, 8)(h, h, use_causal_mask=True)
    h = keras.layers.LayerNormalization()(h)
    model = keras.Model(inputs, keras.layers.Dense(2000, head, dtype="float32")(h))
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=head is None)
    optimizer = keras.optimizers.SGD(0.1)
    if keras.mixed_precision.dtype_policy().name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, loss, **compiled)
    return model


def trained(model, one_hot=False, **given):
    random = np.random.default_rng(0)
    x, y = (random.integers(0, 2000, (19, 32)) for _ in range(2))
    y = keras.utils.to_categorical(y, 2000) if one_hot else y
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, **given)
    return history.history, model.get_weights()


WEIGHTS = np.linspace(0, 1, 19 * 32).reshape(19, 32)
SMOOTHED = {
    "loss": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
}


@pytest.mark.parametrize(
    ("built", "given", "policy"),
    [
        ({"metrics": ["accuracy"]}, {"sample_weight": WEIGHTS}, "float32"),
        pytest.param({"head": "softmax"}, {}, "float32", marks=pytest.mark.slow),
        pytest.param({"mask": True}, {}, "float32", marks=pytest.mark.slow),
        pytest.param(SMOOTHED, {"one_hot": True}, "float32", marks=pytest.mark.slow),
        pytest.param({}, {}, "mixed_float16", marks=pytest.mark.slow),
        pytest.param({"steps_per_execution": 2}, {}, "mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, {}, "float32", marks=pytest.mark.slow),
    ],
    ids=["weights", "softmax", "mask", "smoothed", "float16", "bfloat16", "compiled"],
)
def test_fit_with_a_last_batch_that_is_smaller(built, given, policy):
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        built = {name: value() if callable(value) else value for name, value in built.items()}
        losses, weights = trained(language_model(**built), **given)
        model = save_memory(language_model(**built), pieces=4)
        ours, own = trained(model, **given)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    assert any(one.pieces == 4 for one in plans_of_model(model)[-1].pieces)
    for name in losses:
        np.testing.assert_allclose(ours[name], losses[name], rtol=1e-6)
    exact = 1e-6 if policy == "float32" else 1e-3
    for a, b in zip(own, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=exact)


def test_a_tape_in_a_function():
    weight = tf.Variable(tf.random.stateless_normal((WIDTH, WORDS), (0, 1)))
    x = tf.random.stateless_normal((ROWS, WIDTH), (0, 2))

    def step(tape_of):
        with tape_of() as tape:
            lost = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(ROWS), tf.tanh(x) @ weight
            )
            loss = tf.reduce_mean(lost)
        return loss, tape.gradient(loss, weight)

    ours = tf.function(lambda: step(lambda: GradientTape(checkpoints="memory", pieces=4)))
    loss, grad = ours()
    plain_loss, plain_grad = step(tf.GradientTape)
    assert_close([loss, grad], [plain_loss.numpy(), plain_grad.numpy()])
    (plan,) = get_plans(ours.get_concrete_function().graph)
    assert [one.pieces for one in plan.pieces if one.pieces > 1] == [4]
