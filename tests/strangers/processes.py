"""GPflow: Gaussian processes, exact, sparse, variational, deep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

Program = tuple[Callable[..., Any], list[Any], list[Any]]


def _data(count: int, inputs: int = 4, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((count, inputs))
    return x, np.sin(x @ np.ones((inputs, outputs))) + 0.1 * x[:, :1]


def _exact(name: str, count: int, **options: Any) -> Program:
    """A model that holds its data."""
    import gpflow

    x, y = _data(count)
    if name in ("VGP", "GPMC"):
        options |= {"likelihood": gpflow.likelihoods.StudentT()}
    kernel = gpflow.kernels.Matern52(lengthscales=[1.0] * 4) + gpflow.kernels.Linear()
    model = getattr(gpflow.models, name)((x, y), kernel=kernel, **options)
    return lambda: model.training_loss() / count, [], list(model.trainable_variables)


def _sparse(batch: int) -> Program:
    """Stochastic variational inference, of two outputs that share kernels."""
    import gpflow

    x, y = _data(batch, outputs=2)
    kernels = [gpflow.kernels.SquaredExponential(lengthscales=[1.0] * 4) for _ in range(3)]
    kernel = gpflow.kernels.LinearCoregionalization(
        kernels, W=np.random.default_rng(1).standard_normal((2, 3))
    )
    points = gpflow.inducing_variables.SharedIndependentInducingVariables(
        gpflow.inducing_variables.InducingPoints(x[:128])
    )
    model = gpflow.models.SVGP(
        kernel, gpflow.likelihoods.Gaussian(), points, num_latent_gps=3, num_data=10 * batch
    )
    return (
        lambda *batch: model.training_loss(batch) / (10 * len(x)),
        [x, y],
        list(model.trainable_variables),
    )


def _classes(batch: int) -> Program:
    import gpflow

    x, _ = _data(batch)
    labels = np.digitize(x[:, :1], [-0.5, 0.5])
    model = gpflow.models.SVGP(
        gpflow.kernels.RBF() + gpflow.kernels.White(0.01),
        gpflow.likelihoods.MultiClass(3, invlink=gpflow.likelihoods.RobustMax(3)),
        x[:128],
        num_latent_gps=3,
    )
    return (
        lambda *batch: model.training_loss(batch) / len(x),
        [x, labels],
        list(model.trainable_variables),
    )


def _latent(count: int) -> Program:
    """A Bayesian latent variable model: the inputs are inferred, too."""
    import gpflow

    _, y = _data(count, outputs=12)
    rng = np.random.default_rng(2)
    model = gpflow.models.BayesianGPLVM(
        y,
        X_data_mean=rng.standard_normal((count, 3)),
        X_data_var=np.full((count, 3), 0.1),
        kernel=gpflow.kernels.RBF(lengthscales=[1.0] * 3),
        num_inducing_variables=32,
    )
    return lambda: model.training_loss() / count, [], list(model.trainable_variables)


def _deep_kernel(count: int) -> Program:
    """A network whose last layer is a Gaussian process."""
    import gpflow
    import tf_keras

    network = tf_keras.Sequential(
        [tf_keras.layers.Input((4,), dtype="float64")]
        + [tf_keras.layers.Dense(128, "tanh", dtype="float64") for _ in range(4)]
        + [tf_keras.layers.Dense(4, dtype="float64")]
    )
    x, y = _data(count)
    model = gpflow.models.SVGP(gpflow.kernels.RBF(), gpflow.likelihoods.Gaussian(), x[:64])

    def forward(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return model.training_loss((network(x), y)) / count

    return forward, [x, y], [*model.trainable_variables, *network.variables]


#: name: makes what is differentiated, the arrays that it takes, and its variables
STRANGERS: dict[str, Callable[[], Program]] = {
    "BayesianGPLVM": partial(_latent, 1024),
    "GPMC": partial(_exact, "GPMC", 1024),
    "GPR": partial(_exact, "GPR", 1024),
    "SGPR": partial(_exact, "SGPR", 4096, inducing_variable=_data(128)[0]),
    "SVGP, classes": partial(_classes, 4096),
    "SVGP, outputs": partial(_sparse, 2048),
    "VGP": partial(_exact, "VGP", 768),
    "deep kernel": partial(_deep_kernel, 4096),
}

_MATRICES = "Cholesky and products of float64 pack their matrices into memory that is not predicted"

#: name: why it takes another peak today than what was predicted
KNOWN: dict[str, str] = {
    **dict.fromkeys("GPMC GPR SGPR VGP".split(), _MATRICES),
    "BayesianGPLVM": _MATRICES,
    "SVGP, classes": _MATRICES,
}
