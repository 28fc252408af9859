"""Steps on several devices, for processes of their own: each returns plain numpy values."""

import json
import os

import numpy as np

BATCH, WIDTH, LAYERS = 512, 64, 10


def _tensorflow(cpus):
    """TensorFlow with that many logical CPUs, and this package."""
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    import tensorflow as tf

    import memory_saving_gradients as msg

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * cpus)
    tf.config.experimental.enable_op_determinism()
    tf.random.set_seed(5)
    return tf, msg


def _data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4 * BATCH, WIDTH)).astype(np.float32)
    return x, rng.standard_normal((4 * BATCH, 1)).astype(np.float32)


def _variables(tf):
    rng = np.random.default_rng(1)
    return [
        tf.Variable(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8)
        for _ in range(LAYERS)
    ]


def _loss(tf, weights, x, y):
    for w in weights:
        x = tf.tanh(x @ w)
    return tf.reduce_mean((tf.reduce_mean(x, axis=1, keepdims=True) - y) ** 2)


def split_by_device(saving):
    """A model whose halves lie on two devices, its loss on none: (gradients, devices, plans)."""
    tf, msg = _tensorflow(2)
    weights = _variables(tf)
    x, _ = _data()

    @tf.function
    def step(x):
        with msg.GradientTape() if saving else tf.GradientTape() as tape:
            for i, w in enumerate(weights):
                with tf.device(f"/CPU:{2 * i // LAYERS}"):
                    x = tf.tanh(x @ w)
            loss = tf.reduce_mean(x**2)
        return tape.gradient(loss, weights)

    function = step.get_concrete_function(tf.TensorSpec(x.shape, tf.float32))
    copies = [op for op in function.graph.get_operations() if "recomputed" in op.name]
    right = all(
        op.device == function.graph.get_operation_by_name(op.name.rpartition("/")[0]).device
        for op in copies
    )
    grads = [g.numpy() for g in function(tf.constant(x))]
    devices = sorted({op.device for op in copies if op.device})
    return grads, right and devices, len(msg.get_plans(function.graph))


def _train(tf, msg, strategy, saving, steps=4):
    """A custom loop under a strategy: (losses, weights, seconds of each plan)."""
    with strategy.scope():
        weights = _variables(tf)
    x, y = _data()
    pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    pairs = strategy.experimental_distribute_dataset(pairs.repeat())

    def replica(pair):
        with tf.GradientTape() as tape:
            loss = _loss(tf, weights, *pair)
        grads = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        grads = context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
        for w, g in zip(weights, grads, strict=True):
            w.assign_sub(0.5 * g)
        return loss

    @tf.function
    def step(pair):
        losses = strategy.run(replica, args=(pair,))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    batches = iter(pairs)
    if saving:
        with msg.patch() as patched:
            losses = [float(step(next(batches))) for _ in range(steps)]
        plans = [plan.seconds for plan in patched.plans]
    else:
        losses, plans = [float(step(next(batches))) for _ in range(steps)], []
    return losses, [w.numpy() for w in weights], plans


def mirrored(saving):
    tf, msg = _tensorflow(2)
    return _train(tf, msg, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), saving)


def mirrored_fit(saving):
    """Keras 3 `fit` under `MirroredStrategy`: (losses, weights, plans)."""
    tf, msg = _tensorflow(2)
    import keras

    keras.utils.set_random_seed(1)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    if saving:
        msg.keras.save_memory(model)
    x, y = _data()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    plans = msg.keras.get_plans(model) if saving else []
    return history["loss"], [np.asarray(w) for w in model.get_weights()], [p.seconds for p in plans]


def mirrored_pieces(saving):
    """As `mirrored_fit`, with a loss head that runs in pieces: (losses, weights, its pieces)."""
    tf, msg = _tensorflow(2)
    import keras

    keras.utils.set_random_seed(1)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inputs = keras.Input((WIDTH,))
        model = keras.Model(inputs, keras.layers.Dense(40 * WIDTH)(inputs))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    if saving:
        msg.keras.save_memory(model, pieces=4)
    x, _ = _data()
    y = np.arange(len(x))
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    plans = msg.keras.get_plans(model) if saving else []
    pieces = [one.pieces for plan in plans for one in plan.pieces if one.pieces > 1]
    return history["loss"], [np.asarray(w) for w in model.get_weights()], pieces


def _worker(cluster, index):
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": cluster}, "task": {"type": "worker", "index": index}}
    )
    # gRPC would take the way to the loopback address for one to the outside.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    return _tensorflow(1)


def multi_worker(saving, cluster, index):
    tf, msg = _worker(cluster, index)
    return _train(tf, msg, tf.distribute.MultiWorkerMirroredStrategy(), saving)


def multi_worker_fit(saving, cluster, index):
    """Keras 2 `fit` under `MultiWorkerMirroredStrategy`: (losses, weights, plans)."""
    tf, msg = _worker(cluster, index)
    import tf_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf_keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [tf_keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
        model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), *layers, tf_keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    pairs = tf.data.Dataset.from_tensor_slices(_data()).batch(BATCH).repeat()
    options = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0}
    if not saving:
        history, plans = model.fit(pairs, **options).history, []
    else:
        with msg.patch() as patched:
            history = model.fit(pairs, **options).history
        plans = [plan.seconds for plan in patched.plans]
    return history["loss"], model.get_weights(), plans
