"""One small use of every public differentiable function of `keras.ops` and of TensorFlow.

`FUNCTIONS` maps a qualified name to a function of one float32 tensor of shape (64, 16) with values
in (-1, 1), which applies the named function once. `SKIPPED` gives the reason for what is not
covered, and `NOT_DIFFERENTIABLE` is what has no gradient by its nature.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

NAMESPACES = {
    "keras.ops": keras.ops,
    "keras.ops.image": keras.ops.image,
    "tf.math": tf.math,
    "tf.math.special": tf.math.special,
    "tf.nn": tf.nn,
    "tf.nn.experimental": tf.nn.experimental,
    "tf.linalg": tf.linalg,
    "tf.linalg.experimental": tf.linalg.experimental,
    "tf.signal": tf.signal,
    "tf.image": tf.image,
    "tf.sparse": tf.sparse,
    "tf.ragged": tf.ragged,
    "tf": tf,
}
PUBLIC: dict[str, Callable] = {}  # every public function, by the first of its names
ALIASES: dict[str, str] = {}  # the other names of the same objects
first_names: dict[int, str] = {}
for namespace, module in NAMESPACES.items():
    for word in dir(module):
        value, name = getattr(module, word), f"{namespace}.{word}"
        if callable(value) and not inspect.isclass(value) and not word.startswith("_"):
            if first_names.setdefault(id(value), name) == name:
                PUBLIC[name] = value
            else:
                ALIASES[name] = first_names[id(value)]

ROWS = np.array([0, 2, 5, 5])
COLUMNS = np.arange(64) % 16  # also the labels of 16 classes
SEGMENTS = np.arange(64) // 8
MASK = np.arange(64 * 16).reshape(64, 16) % 3 == 0
POINTS = np.argwhere(MASK)  # places in x, in order
CORNERS = np.array([[0, 0], [3, 5], [63, 15]])
BOXES = [[0.1, 0.2, 0.8, 0.9], [0.0, 0.3, 0.6, 1.0]]
QUADS = np.array([[[0, 0], [7, 0], [0, 7], [7, 7]]] * 4, np.float32)
AFFINE = np.array([1, 0.1, 0.2, 0.1, 0.9, 0.3, 0, 0], np.float32)
ONES, TWOS, NO_CROP = [1] * 4, [1, 2, 2, 2, 1], [[0, 0], [0, 0]]
SEED = [1, 2]


# What is made of x, or of y, a second operand like x.
def positive(x, least=0.5):
    return x * x + least


def unit(x):
    """In (0, 1)."""
    return x * 0.4 + 0.5


def square(x):
    return tf.reshape(x, (4, 16, 16))


def matrix(x):
    """Well conditioned, not symmetric."""
    return tf.eye(16) + square(x) * 0.2


def lower(x):
    return tf.linalg.band_part(matrix(x), -1, 0)


def symmetric(x):
    return square(x) + tf.linalg.matrix_transpose(square(x))


def spd(x):
    """Symmetric and positive definite."""
    return tf.eye(16) + tf.matmul(square(x), square(x), transpose_b=True) / 16.0


def image(x):
    return tf.reshape(x, (4, 8, 8, 4))


def volume(x):
    return tf.reshape(x, (2, 4, 4, 8, 4))


def rgb(x):
    return unit(image(x)[..., :3])


def picture(x):
    return unit(tf.reshape(x[:48], (1, 16, 16, 3)))


def kernel(x, *shape):
    shape = shape or (3, 3, 4, 4)
    return tf.reshape(tf.reshape(x, [-1])[: np.prod(shape)], shape)


def sparse(x):
    return tf.SparseTensor(POINTS, tf.gather_nd(x, POINTS), (64, 16))


def sparse_ids():
    return tf.SparseTensor([[0, 0], [0, 1], [2, 0]], tf.constant([1, 3, 9], tf.int64), (3, 2))


def ragged(x):
    return tf.RaggedTensor.from_row_lengths(x, [3, 0, 21, 40])


def operator(x):
    return tf.linalg.LinearOperatorFullMatrix(spd(x), True, True, True)


def sampled():
    """The sampled values of the losses that sample classes."""
    return tf.constant([20, 30, 40, 50], tf.int64), tf.fill((64, 1), 0.1), tf.fill((4,), 0.1)


def with_gradient(x):
    return x * x, lambda upstream: upstream * 2.0 * x


# {namespace: {names: how to call a function f of that name}}; "" is for every namespace.
CASES: dict[str, dict[str, Callable[[Callable, tf.Tensor, tf.Tensor], Any]]] = {
    "": {
        # Of one tensor.
        "abs absolute acos adjoint amax amin arccos arcsin arcsinh arctan arctanh array asin asinh"
        " atan atanh average bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 cbrt"
        " celu convert_to_tensor copy cos cosh crelu cumsum cumulative_logsumexp"
        " dawsn dct deg2rad diag diag_part diagonal diff elu erf erfc erfinv exp exp2 expm1 fabs"
        " fftshift flip fliplr flipud fresnel_cos fresnel_sin from_dense gelu glu hard_shrink"
        " hard_sigmoid hard_silu hard_tanh i0 idct identity ifftshift inverse_mdct"
        " isotonic_regression l2_loss l2_normalize layer_normalization leaky_relu log_sigmoid"
        " log_softmax logsumexp matrix_transpose max mean median mfccs_from_log_mel_spectrograms"
        " min nan_to_num nancumsum nanmax nanmean nanmedian nanmin nanstd nansum nanvar negative"
        " norm normalize ptp rad2deg ravel reciprocal_no_nan reduce_euclidean_norm"
        " reduce_logsumexp reduce_max reduce_mean reduce_min reduce_std reduce_sum reduce_variance"
        " relu relu6 rfft rfft2d rms_normalization rot90 scale_regularization_loss selu sigmoid"
        " silu sin sinc sinh soft_shrink softmax softplus softsign sort sparse_plus sparse_sigmoid"
        " square squareplus squeeze std sum tan tanh tanh_shrink trace transpose trapezoid"
        " tril triu unstack var": lambda f, x, y: f(x),
        "bessel_k0 bessel_k0e bessel_k1 bessel_k1e bessel_y0 bessel_y1 digamma expint lbeta lgamma"
        " log log10 log1p log2 reciprocal rsqrt spence sqrt": lambda f, x, y: f(positive(x)),
        "acosh arccosh": lambda f, x, y: f(positive(x, 1.5)),
        "erfcinv ndtri": lambda f, x, y: f(unit(x)),
        "angle conj conjugate fft fft2d ifft ifft2d imag irfft irfft2d real": lambda f, x, y: f(
            tf.complex(x, y)
        ),
        "cumprod nancumprod nanprod prod reduce_prod": lambda f, x, y: f(positive(x), axis=1),
        "diagflat tensor_diag": lambda f, x, y: f(x[0]),
        "fft3d ifft3d": lambda f, x, y: f(tf.complex(square(x), square(y))),
        "cholesky det inv logdet slogdet sqrtm": lambda f, x, y: f(spd(x)),
        "eig eigvals expm pinv qr svd": lambda f, x, y: f(matrix(x)),
        "eigh eigvalsh": lambda f, x, y: f(symmetric(x)),
        "cholesky_inverse": lambda f, x, y: f(lower(x)),
        "adaptive_average_pool adaptive_max_pool": lambda f, x, y: f(image(x), 3),
        "local_response_normalization": lambda f, x, y: f(image(x)),
        "flip_left_right flip_up_down gaussian_blur image_gradients per_image_standardization"
        " rgb_to_grayscale rgb_to_hsv rgb_to_yiq rgb_to_yuv sobel_edges total_variation yiq_to_rgb"
        " yuv_to_rgb": lambda f, x, y: f(rgb(x)),
        "reorder reset_shape to_dense": lambda f, x, y: f(sparse(x)),
        # Of two tensors.
        "add append arctan2 atan2 cdist complex fmax fmin hypot inner logaddexp logaddexp2 maximum"
        " minimum multiply multiply_no_nan nextafter squared_difference subtract"
        " vdot": lambda f, x, y: f(x, y),
        "divide divide_no_nan floormod fmod mod realdiv true_divide truediv xdivy xlog1py"
        " xlogy": lambda f, x, y: f(x, positive(y)),
        "igamma igammac polar pow power": lambda f, x, y: f(positive(x), positive(y)),
        "geomspace logspace": lambda f, x, y: f(positive(x), positive(y), 5),
        "linspace": lambda f, x, y: f(x, y, 5),
        "accumulate_n add_n concatenate dstack global_norm hstack identity_n stack tuple"
        " vstack": lambda f, x, y: f([x, y]),
        "concat": lambda f, x, y: f([x, y], 0),
        "correlate meshgrid": lambda f, x, y: f(x[0], y[1, :5]),
        "cross": lambda f, x, y: f(x[:, :3], y[:, :3]),
        "outer": lambda f, x, y: f(x[:4], y[:4]),
        "dot matmul": lambda f, x, y: f(x, tf.transpose(y)),
        "bias_add matvec": lambda f, x, y: f(x, y[0]),
        "tensordot": lambda f, x, y: f(x, y, [[1], [1]]),
        "einsum": lambda f, x, y: f("ab,cb->ac", x, y),
        "vander": lambda f, x, y: f(x[0], 4),
        "lstsq": lambda f, x, y: f(x, y[:, :2]),
        "solve": lambda f, x, y: f(matrix(x), square(y)),
        "cholesky_solve triangular_solve": lambda f, x, y: f(lower(x), square(y)),
        "solve_triangular": lambda f, x, y: f(lower(x), square(y), lower=True),
        "psnr": lambda f, x, y: f(rgb(x), rgb(y), 1.0),
        "ssim": lambda f, x, y: f(picture(x), picture(y), 1.0),
        # Of a tensor and constants.
        "array_split hsplit split vsplit": lambda f, x, y: f(x, 2),
        "dsplit": lambda f, x, y: f(square(x), 2),
        "band_part": lambda f, x, y: f(x, 2, 1),
        "boolean_mask": lambda f, x, y: f(x, MASK),
        "broadcast_to": lambda f, x, y: f(x, (2, 64, 16)),
        "cast": lambda f, x, y: f(x, "float64"),
        "saturate_cast": lambda f, x, y: f(x, "float16"),
        "clip clip_by_value": lambda f, x, y: f(x, -0.5, 0.5),
        "clip_by_norm": lambda f, x, y: f(x, 1.0),
        "depth_to_space space_to_depth": lambda f, x, y: f(image(x), 2),
        "kaiser kaiser_bessel_derived_window kaiser_window": lambda f, x, y: f(
            16, positive(x[0, 0])
        ),
        "ensure_shape": lambda f, x, y: f(x, (64, 16)),
        "expand_dims": lambda f, x, y: f(x, 1),
        "extract_sequences frame": lambda f, x, y: f(x, 8, 4),
        "gather": lambda f, x, y: f(x, ROWS),
        "gather_nd": lambda f, x, y: f(x, CORNERS),
        "ldexp": lambda f, x, y: f(x, ROWS[:1]),
        "moments sufficient_statistics": lambda f, x, y: f(x, [0]),
        "moveaxis swapaxes": lambda f, x, y: f(x, 0, 1),
        "nanpercentile percentile": lambda f, x, y: f(x, 30.0),
        "nanquantile quantile": lambda f, x, y: f(x, 0.3),
        "overlap_and_add": lambda f, x, y: f(x, 4),
        "pad": lambda f, x, y: f(x, [[1, 1], [0, 2]], constant_values=0.5),
        "repeat": lambda f, x, y: f(x, 2, 0),
        "reshape": lambda f, x, y: f(x, (32, 32)),
        "resize": lambda f, x, y: f(rgb(x), (5, 11)),
        "reverse": lambda f, x, y: f(x, [0]),
        "reverse_sequence": lambda f, x, y: f(x, COLUMNS, 1, 0),
        "roll": lambda f, x, y: f(x, 3, 0),
        "scatter scatter_nd": lambda f, x, y: f(CORNERS, x[0, :3], (64, 16)),
        "scatter_update tensor_scatter_nd_add tensor_scatter_nd_max tensor_scatter_nd_min"
        " tensor_scatter_nd_sub tensor_scatter_nd_update": lambda f, x, y: f(x, CORNERS, y[0, :3]),
        "segment_max segment_mean segment_min segment_prod segment_sum": lambda f, x, y: f(
            x, SEGMENTS
        ),
        "unsorted_segment_max unsorted_segment_mean unsorted_segment_min unsorted_segment_prod"
        " unsorted_segment_sqrt_n unsorted_segment_sum": lambda f, x, y: f(x, SEGMENTS[::-1], 8),
        "slice": lambda f, x, y: f(x, (1, 2), (8, 8)),
        "tile": lambda f, x, y: f(x, (2, 1)),
        "approx_max_k approx_top_k top_k": lambda f, x, y: f(x, 3),
        "where": lambda f, x, y: f(MASK, x, y),
        # Of functions.
        "cond": lambda f, x, y: f(x[0, 0] > y[0, 0], lambda: tf.sin(x), lambda: tf.cos(y)),
        "custom_gradient": lambda f, x, y: f(with_gradient)(x),
        "function grad_pass_through recompute_grad": lambda f, x, y: f(tf.sin)(x),
        "map map_fn vectorized_map": lambda f, x, y: f(tf.sin, x),
        "foldl foldr": lambda f, x, y: f(lambda a, b: tf.sin(a + b), x),
        "while_loop": lambda f, x, y: f(
            lambda i, a: i < 3, lambda i, a: (i + 1, tf.sin(a)), (0, x)
        ),
    },
    "keras.ops": {
        "fft fft2 ifft2 irfft": lambda f, x, y: f((x, y)),
        "stft": lambda f, x, y: f(x, 8, 4, 8),
        "istft": lambda f, x, y: f((x[:, :5], y[:, :5]), 8, 4, 8),
        "view_as_complex": lambda f, x, y: f(x[:, :2]),
        "view_as_real": lambda f, x, y: f(tf.complex(x, y)),
        "sparsemax": lambda f, x, y: f(x[:, :2]),
        "full": lambda f, x, y: f((2, 64, 16), x),
        "full_like": lambda f, x, y: f(x, y[0]),
        "heaviside": lambda f, x, y: f(tf.zeros_like(x), y),
        "get_item": lambda f, x, y: f(x, (slice(1, 9), 3)),
        "rearrange": lambda f, x, y: f(x, "(a b) c -> b a c", a=4),
        "select": lambda f, x, y: f([MASK], [x], 0.5),
        "take": lambda f, x, y: f(x, ROWS, axis=0),
        "take_along_axis": lambda f, x, y: f(x, COLUMNS[:, None], axis=1),
        "threshold": lambda f, x, y: f(x, 0.1, 0.0),
        "batch_normalization": lambda f, x, y: f(x, y[0], positive(y[1]), -1, y[2], y[3]),
        "dot_product_attention": lambda f, x, y: f(image(x), image(y), image(x)),
        "average_pool max_pool": lambda f, x, y: f(image(x), 2),
        "conv conv_transpose": lambda f, x, y: f(image(x), kernel(y)),
        "depthwise_conv": lambda f, x, y: f(image(x), kernel(y, 3, 3, 4, 1)),
        "separable_conv": lambda f, x, y: f(
            image(x), kernel(y, 3, 3, 4, 1), kernel(y, 1, 1, 4, 4), padding="same"
        ),
        "unfold": lambda f, x, y: f(tf.reshape(x, (4, 4, 8, 8)), 2),
        "fold": lambda f, x, y: f(square(x), (8, 8), 2, stride=2),
        "binary_crossentropy": lambda f, x, y: f(unit(x), unit(y)),
        "categorical_crossentropy": lambda f, x, y: f(tf.nn.softmax(x), y, from_logits=True),
        "sparse_categorical_crossentropy": lambda f, x, y: f(COLUMNS, x, from_logits=True),
        "ctc_loss": lambda f, x, y: f([[1, 2, 3]] * 4, square(x), [3, 2, 3, 1], [16] * 4),
        "switch": lambda f, x, y: f(1, [tf.sin, tf.cos], x),
        "fori_loop": lambda f, x, y: f(0, 3, lambda i, a: tf.sin(a), x),
        "scan": lambda f, x, y: f(lambda a, b: (tf.sin(a + b), a * b), y[0], x),
        "associative_scan": lambda f, x, y: f(lambda a, b: a * b + a + b, x),
        "jvp": lambda f, x, y: f(tf.sin, (x,), (y,)),
    },
    "keras.ops.image": {
        "affine_transform": lambda f, x, y: f(rgb(x), AFFINE),
        "crop_images": lambda f, x, y: f(rgb(x), 1, 2, target_height=4, target_width=4),
        "pad_images": lambda f, x, y: f(rgb(x), 1, 2, target_height=12, target_width=12),
        "elastic_transform": lambda f, x, y: f(rgb(x), 2.0, 1.0, seed=1),
        "extract_patches": lambda f, x, y: f(image(x), 3),
        "extract_patches_3d": lambda f, x, y: f(volume(x), 2),
        "map_coordinates": lambda f, x, y: f(x, [positive(x) * 5.0, positive(y) * 4.0], 1),
        "perspective_transform": lambda f, x, y: f(rgb(x), QUADS, QUADS * 0.9 + 0.2),
        "scale_and_translate": lambda f, x, y: f(
            x, (20, 20), positive(y[0, :2]), y[1, :2], (0, 1), "linear"
        ),
    },
    "tf.math": {
        "betainc": lambda f, x, y: f(tf.fill((64, 16), 1.5), tf.fill((64, 16), 2.5), unit(x)),
        "confusion_matrix": lambda f, x, y: f(COLUMNS, COLUMNS[::-1], 16, x[:, 0], tf.float32),
        "polygamma": lambda f, x, y: f(tf.ones((64, 16)), positive(x)),
        "polyval": lambda f, x, y: f([x[0], x[1], x[2]], y),
        "scalar_mul": lambda f, x, y: f(x[0, 0], y),
        "zeta": lambda f, x, y: f(tf.fill((64, 16), 2.5), positive(x)),
    },
    "tf.nn": {
        "batch_normalization": lambda f, x, y: f(x, y[0], positive(y[1]), y[2], y[3], 1e-3),
        "batch_norm_with_global_normalization": lambda f, x, y: f(
            image(x), y[0, :4], positive(y[1, :4]), y[2, :4], y[3, :4], 1e-3, True
        ),
        "normalize_moments": lambda f, x, y: f(64.0, x, positive(x, 1.5) * 64.0, y),
        "weighted_moments": lambda f, x, y: f(x, [0], positive(y)),
        "avg_pool avg_pool2d max_pool max_pool2d max_pool_with_argmax": lambda f, x, y: f(
            image(x), 2, 2, "SAME"
        ),
        "avg_pool1d max_pool1d": lambda f, x, y: f(square(x), 2, 2, "SAME"),
        "avg_pool3d max_pool3d": lambda f, x, y: f(volume(x), 2, 2, "SAME"),
        "fractional_avg_pool fractional_max_pool": lambda f, x, y: f(
            image(x), [1, 1.4, 1.4, 1], seed=1
        ),
        "pool": lambda f, x, y: f(image(x), (2, 2), "AVG"),
        "convolution": lambda f, x, y: f(image(x), kernel(y)),
        "conv1d": lambda f, x, y: f(square(x), kernel(y, 3, 16, 4), 1, "SAME"),
        "conv2d": lambda f, x, y: f(image(x), kernel(y), 1, "SAME"),
        "conv3d": lambda f, x, y: f(volume(x), kernel(y, 2, 2, 2, 4, 4), [1] * 5, "SAME"),
        "atrous_conv2d": lambda f, x, y: f(image(x), kernel(y), 2, "SAME"),
        "atrous_conv2d_transpose": lambda f, x, y: f(image(x), kernel(y), (4, 8, 8, 4), 2, "SAME"),
        "conv1d_transpose": lambda f, x, y: f(square(x), kernel(y, 3, 4, 16), (4, 32, 4), 2),
        "conv2d_transpose conv_transpose": lambda f, x, y: f(
            image(x), kernel(y), (4, 16, 16, 4), 2
        ),
        "conv3d_transpose": lambda f, x, y: f(
            volume(x), kernel(y, 2, 2, 2, 4, 4), (2, 8, 8, 16, 4), 2
        ),
        "depthwise_conv2d": lambda f, x, y: f(image(x), kernel(y), ONES, "SAME"),
        "depthwise_conv2d_backprop_filter": lambda f, x, y: f(
            image(x), (3, 3, 4, 1), image(y), ONES, "SAME"
        ),
        "depthwise_conv2d_backprop_input": lambda f, x, y: f(
            (4, 8, 8, 4), kernel(x, 3, 3, 4, 1), image(y), ONES, "SAME"
        ),
        "separable_conv2d": lambda f, x, y: f(
            image(x), kernel(y, 3, 3, 4, 1), kernel(y, 1, 1, 4, 4), ONES, "SAME"
        ),
        "dilation2d erosion2d": lambda f, x, y: f(
            image(x), kernel(y, 3, 3, 4), ONES, "SAME", "NHWC", ONES
        ),
        "with_space_to_batch": lambda f, x, y: f(
            image(x), [2, 2], "VALID", lambda a, _, padding: tf.nn.avg_pool2d(a, 2, 1, padding)
        ),
        "space_to_batch": lambda f, x, y: f(image(x), [2, 2], NO_CROP),
        "dropout": lambda f, x, y: f(x, 0.3, seed=1),
        "embedding_lookup": lambda f, x, y: f(x, ROWS, 1.0),
        "embedding_lookup_sparse": lambda f, x, y: f(x, sparse_ids(), None, "mean"),
        "safe_embedding_lookup_sparse": lambda f, x, y: f(x, sparse_ids()),
        "compute_average_loss": lambda f, x, y: f(x[:, 0], y[:, 1]),
        "ctc_loss": lambda f, x, y: f(
            tf.constant([[1, 2, 3]] * 4), square(x), [3, 2, 3, 1], [16] * 4, False, blank_index=0
        ),
        "log_poisson_loss": lambda f, x, y: f(positive(x), y, True),
        "nce_loss sampled_softmax_loss": lambda f, x, y: f(
            x, x[:, 0], COLUMNS[:, None], y, 4, 64, sampled_values=sampled()
        ),
        "sigmoid_cross_entropy_with_logits": lambda f, x, y: f(unit(x), y),
        "weighted_cross_entropy_with_logits": lambda f, x, y: f(unit(x), y, 2.0),
        "softmax_cross_entropy_with_logits": lambda f, x, y: f(tf.nn.softmax(x), y),
        "sparse_softmax_cross_entropy_with_logits": lambda f, x, y: f(COLUMNS, x),
    },
    "tf.nn.experimental": {
        "stateless_dropout": lambda f, x, y: f(x, 0.3, SEED),
        "general_dropout": lambda f, x, y: f(
            x, 0.3, lambda shape, dtype: tf.random.stateless_uniform(shape, SEED, dtype=dtype)
        ),
    },
    "tf.linalg": {
        "banded_triangular_solve": lambda f, x, y: f([positive(x[0], 1.5), x[1]], tf.transpose(y)),
        "eigh_tridiagonal": lambda f, x, y: f(x[0], y[1, :15]),
        "lu_matrix_inverse lu_reconstruct": lambda f, x, y: f(matrix(x), [[*range(16)]] * 4),
        "lu_solve": lambda f, x, y: f(matrix(x), [[*range(16)]] * 4, square(y)),
        "set_diag": lambda f, x, y: f(x, y[0]),
        "tensor_diag_part": lambda f, x, y: f(square(x)[0]),
        "tridiagonal_matmul tridiagonal_solve": lambda f, x, y: f(
            tf.stack([x[0], positive(x[1], 2.5), x[2]]), tf.transpose(y)
        ),
    },
    "tf.linalg.experimental": {
        "conjugate_gradient": lambda f, x, y: f(operator(x), square(y)[:, 0])
    },
    "tf.signal": {
        "stft": lambda f, x, y: f(x, 8, 4),
        "inverse_stft": lambda f, x, y: f(tf.complex(x, y)[:, :9], 16, 8),
        "mdct": lambda f, x, y: f(x, 8),
    },
    "tf.image": {
        "rot90 transpose": lambda f, x, y: f(rgb(x)),
        "adjust_brightness adjust_gamma": lambda f, x, y: f(rgb(x), 0.3),
        "central_crop": lambda f, x, y: f(rgb(x), 0.5),
        "convert_image_dtype": lambda f, x, y: f(rgb(x), tf.float16),
        "crop_and_resize": lambda f, x, y: f(rgb(x), BOXES, [0, 2], (5, 5)),
        "crop_to_bounding_box": lambda f, x, y: f(rgb(x), 1, 2, 4, 4),
        "pad_to_bounding_box": lambda f, x, y: f(rgb(x), 1, 2, 12, 12),
        "extract_patches": lambda f, x, y: f(rgb(x), [1, 3, 3, 1], [1, 2, 2, 1], ONES, "SAME"),
        "grayscale_to_rgb": lambda f, x, y: f(rgb(x)[..., :1]),
        "resize_with_crop_or_pad resize_with_pad": lambda f, x, y: f(rgb(x), 12, 6),
        "ssim_multiscale": lambda f, x, y: f(picture(x), picture(y), 1.0, (0.5, 0.5), 5),
        "stateless_random_brightness": lambda f, x, y: f(rgb(x), 0.3, SEED),
        "stateless_random_crop": lambda f, x, y: f(rgb(x), (4, 5, 5, 3), SEED),
        "random_brightness": lambda f, x, y: f(rgb(x), 0.3, seed=1),
        "random_crop": lambda f, x, y: f(rgb(x), (4, 5, 5, 3), seed=1),
        "random_flip_left_right random_flip_up_down": lambda f, x, y: f(rgb(x), seed=1),
        "stateless_random_flip_left_right stateless_random_flip_up_down": lambda f, x, y: f(
            rgb(x), SEED
        ),
    },
    "tf.sparse": {
        "reduce_sum softmax transpose": lambda f, x, y: f(sparse(x)),
        "add": lambda f, x, y: f(sparse(x), sparse(y)),
        "expand_dims": lambda f, x, y: f(sparse(x), 0),
        "fill_empty_rows": lambda f, x, y: f(sparse(x), 0.5),
        "map_values": lambda f, x, y: f(tf.sin, sparse(x)),
        "mask": lambda f, x, y: f(tf.IndexedSlices(x, tf.range(64)), ROWS),
        "reshape": lambda f, x, y: f(sparse(x), (32, 32)),
        "retain": lambda f, x, y: f(sparse(x), np.arange(len(POINTS)) % 2 == 0),
        "sampled_addmm": lambda f, x, y: f(CORNERS, x[0, :3], (64, 64), x, tf.transpose(y)),
        "segment_mean segment_sqrt_n segment_sum": lambda f, x, y: f(x, ROWS, [0, 0, 1, 1]),
        "slice": lambda f, x, y: f(sparse(x), (1, 2), (30, 9)),
        "sparse_dense_matmul": lambda f, x, y: f(sparse(x), tf.transpose(y)),
    },
    "tf.ragged": {
        "map_flat_values": lambda f, x, y: f(tf.sin, ragged(x)),
        "stack_dynamic_partitions": lambda f, x, y: f(x, COLUMNS, 16),
    },
    "tf": {
        "batch_to_space space_to_batch_nd": lambda f, x, y: f(image(x), [2, 2], NO_CROP),
        "case": lambda f, x, y: f([(x[0, 0] > 0, lambda: tf.sin(x))], lambda: tf.cos(x)),
        "switch_case": lambda f, x, y: f(tf.constant(1), [lambda: tf.sin(x), lambda: tf.cos(x)]),
        "clip_by_global_norm": lambda f, x, y: f([x, y], 1.0),
        "dynamic_partition": lambda f, x, y: f(x, SEGMENTS, 8),
        "dynamic_stitch": lambda f, x, y: f([[0, 2], [1, 3]], [x[:2], y[:2]]),
        "extract_volume_patches": lambda f, x, y: f(volume(x), TWOS, TWOS, "SAME"),
        "fill": lambda f, x, y: f((64, 16), x[0, 0]),
        "gradients": lambda f, x, y: f(tf.sin(x), x),
        "hessians": lambda f, x, y: (lambda a: f(tf.reduce_sum(a**3), a))(tf.identity(x[0])),
        "py_function": lambda f, x, y: f(tf.sin, [x], tf.float32),
        "ragged_fill_empty_rows": lambda f, x, y: f([0, 0, 2], x[0, :3], 4, y[0, 0]),
        "scan": lambda f, x, y: f(lambda a, b: tf.sin(a + b), x),
        "strided_slice": lambda f, x, y: f(x, (1, 2), (9, 14), (2, 3)),
    },
}

REASONS = {
    "no gradient is registered for its operation": "keras.ops.bincount keras.ops.lu_factor"
    " keras.ops.slice_update keras.ops.unique keras.ops.view tf.bitcast tf.check_pinned tf.conv"
    " tf.conv2d_backprop_filter_v2 tf.conv2d_backprop_input_v2 tf.fftnd tf.guarantee_const"
    " tf.ifftnd tf.image.adjust_contrast tf.image.adjust_hue tf.image.adjust_saturation"
    " tf.image.draw_bounding_boxes tf.image.extract_glimpse"
    " tf.image.non_max_suppression_with_scores"
    " tf.image.random_contrast tf.image.random_hue tf.image.random_saturation"
    " tf.image.stateless_random_contrast tf.image.stateless_random_hue"
    " tf.image.stateless_random_saturation tf.irfftnd tf.linalg.logm tf.linalg.lu tf.math.bincount"
    " tf.parallel_stack tf.ragged_fill_empty_rows_grad tf.rfftnd tf.signal.fftnd tf.signal.ifftnd"
    " tf.signal.irfft3d tf.signal.irfftnd tf.signal.rfft3d tf.signal.rfftnd tf.sparse.bincount"
    " tf.sparse.reduce_max tf.sparse.split tf.truncatemod tf.unique tf.unique_with_counts",
    "its operation is registered as not differentiable": "keras.ops.image.hsv_to_rgb"
    " tf.image.generate_bounding_box_proposals"
    " tf.image.hsv_to_rgb tf.sparse.concat",
    "its gradient raises an error": "tf.sparse.maximum tf.sparse.minimum",
    "it has a kernel under XLA only": "tf.math.approx_min_k",
    "it fails inside a tf.function": "keras.ops.corrcoef keras.ops.kron",
    "the TensorFlow backend does not have it": "keras.ops.vectorize",
}
SKIPPED = {name: reason for reason, names in REASONS.items() for name in names.split()}

NOT_DIFFERENTIABLE = set(
    # In every namespace: comparisons, rounding, indices, integers.
    "all allclose any argmax argmin argpartition argsort ceil count_nonzero digitize equal floor"
    " floor_divide floordiv gcd greater greater_equal histogram histogram_fixed_width"
    " histogram_fixed_width_bins in_top_k invert_permutation is_finite is_inf is_nan"
    " is_non_decreasing is_strictly_increasing isclose isfinite isin isinf isnan isneginf isposinf"
    " isreal lcm left_shift less less_equal logical_and logical_not logical_or logical_xor"
    " bitwise_and bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift"
    " bitwise_xor matrix_rank nanargmax nanargmin nonzero not_equal reduce_all reduce_any"
    " right_shift rint round searchsorted sign signbit stop_gradient trunc truncatediv"
    " unravel_index zero_fraction"
    # Constants and shapes.
    " arange bartlett blackman broadcast_dynamic_shape broadcast_static_shape constant dtype empty"
    " empty_like eye hamming hamming_window hann_window hanning inverse_stft_window_fn"
    " keras.ops.identity linear_to_mel_weight_matrix"
    " multi_hot ndim one_hot ones ones_like range rank required_space_to_batch_paddings"
    " row_splits_to_segment_ids segment_ids_to_row_splits sequence_mask shape shape_n size"
    " sobol_sample tri vorbis_window zeros zeros_like"
    # Integers, strings, encoded images, boxes.
    " adjust_jpeg_quality all_candidate_sampler as_string collapse_repeated"
    " combined_non_max_suppression compute_accidental_hits cross_hashed"
    " ctc_beam_search_decoder ctc_decode ctc_greedy_decoder ctc_unique_labels"
    " decode_and_crop_jpeg decode_bmp decode_gif decode_image decode_jpeg decode_jxl decode_png"
    " decode_webp edit_distance encode_jpeg encode_png extract_jpeg_shape fingerprint"
    " fixed_unigram_candidate_sampler is_jpeg learned_unigram_candidate_sampler"
    " non_max_suppression non_max_suppression_overlaps non_max_suppression_padded"
    " random_index_shuffle random_jpeg_quality sample_distorted_bounding_box"
    " stateless_random_jpeg_quality stateless_sample_distorted_bounding_box to_indicator"
    " tf.ragged.cross tf.sparse.cross"
    # Python, graphs, checks, scopes.
    " Assert as_dtype assert_equal assert_greater assert_less assert_rank control_dependencies"
    " convert_to_numpy device executing_eagerly get_current_name_scope get_logger get_static_value"
    " group import_graph_def init_scope inside_function is_symbolic_tensor is_tensor load_library"
    " load_op_library make_ndarray make_tensor_proto no_gradient no_op"
    " nondifferentiable_batch_function numpy_function print register_tensor_conversion_function"
    " timestamp type_spec_from_value variable_creator_scope".split()
)
# Stateful generators: another result in every call, even with a seed.
RANDOM = {"tf.nn.dropout"} | {
    f"tf.image.random_{word}" for word in "brightness crop flip_left_right flip_up_down".split()
}


def applied(function: Callable, call: Callable) -> Callable[[tf.Tensor], Any]:
    return lambda x: call(function, x, tf.roll(x, 1, 0))


CALLS = {
    (namespace, word): call
    for namespace, cases in CASES.items()
    for words, call in cases.items()
    for word in words.split()
}
FUNCTIONS: dict[str, Callable[[tf.Tensor], Any]] = {}
for name, function in PUBLIC.items():
    namespace, _, word = name.rpartition(".")
    call = CALLS.get((namespace, word)) or CALLS.get(("", word))
    if call and name not in SKIPPED and not NOT_DIFFERENTIABLE & {name, word}:
        FUNCTIONS[name] = applied(function, call)
