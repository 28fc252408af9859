"""The TensorFlow models of Hugging Face's transformers, from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tests.strangers.measured import GROUPS

VOCABULARY = 128
_WORDS = {"vocab_size": VOCABULARY, "type_vocab_size": 2, "max_position_embeddings": 64}
_WIDTH = {"hidden_size": 64, "intermediate_size": 128}
_DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 2}
_ENCODER = _WORDS | _WIDTH | _DEPTH
#: what Bart and its like call it
_BOTH = {
    **{"vocab_size": VOCABULARY, "d_model": 64, "max_position_embeddings": 64},
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")},
}


def _tokens(batch: int, length: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCABULARY, (batch, length), "int32")


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, "float32")


def _model(
    name: str, config: dict[str, Any], inputs: dict[str, np.ndarray], **parts: dict[str, Any]
) -> tuple[Callable[..., Any], list[np.ndarray], list[tf.Variable]]:
    """A model, built from its configuration.

    Args:
        name: the class of the model, without "TF".
        config: its configuration.
        inputs: what it is called with.
        **parts: configurations within the configuration.
    """
    import transformers

    cls = getattr(transformers, f"TF{name}")
    parts = {f"{part}_config": options for part, options in parts.items()}
    model = cls(cls.config_class(**config, **parts))
    model(inputs, training=True)  # makes the variables

    def forward(*tensors: tf.Tensor) -> Any:
        return dict(model(dict(zip(inputs, tensors, strict=True)), training=True))

    # Some decide by the values of tensors: without AutoGraph they cannot be traced.
    return tf.autograph.to_graph(forward), list(inputs.values()), model.variables


def _text(name: str, batch: int, **config: Any) -> partial:
    return partial(_model, name, config, {"input_ids": _tokens(batch)})


def _pair(name: str, batch: int, **config: Any) -> partial:
    """An encoder and a decoder."""
    tokens = _tokens(batch)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens}
    return partial(_model, name, {"use_cache": False} | config, inputs)


def _image(name: str, batch: int, size: int = 32, **config: Any) -> partial:
    return partial(_model, name, config, {"pixel_values": _floats(batch, 3, size, size)})


_CLIP_TEXT = _WORDS | _WIDTH | _DEPTH | {"bos_token_id": 0, "eos_token_id": 1}
_PATCHES = {"image_size": 32, "patch_size": 8}

#: name: makes what is differentiated, the arrays that it takes, and its variables
STRANGERS: dict[str, Callable[[], tuple[Callable[..., Any], list[Any], list[Any]]]] = {
    "Albert": _text("AlbertModel", 128, **_ENCODER, embedding_size=32),
    "Bart": _pair("BartModel", 64, **_BOTH),
    "Bert, words hidden": _text("BertForMaskedLM", 128, **_ENCODER),
    "CLIP": partial(
        _model,
        "CLIPModel",
        {"projection_dim": 32},
        {"input_ids": _tokens(128), "pixel_values": _floats(128, 3, 32, 32)},
        text=_CLIP_TEXT,
        vision=_WIDTH | _DEPTH | _PATCHES,
    ),
    "ConvBert": _text("ConvBertModel", 128, **_ENCODER, embedding_size=32),
    "ConvNextV2": _image(
        "ConvNextV2Model", 64, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1], patch_size=2
    ),
    "DebertaV2": _text(
        "DebertaV2Model", 128, **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "Funnel": _text(
        "FunnelModel",
        64,
        vocab_size=VOCABULARY,
        block_sizes=[1, 1, 1],
        d_model=64,
        n_head=2,
        d_head=32,
        d_inner=128,
    ),
    "GPT2, next words": _text(
        "GPT2LMHeadModel",
        128,
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        use_cache=False,
    ),
    "Longformer": _text("LongformerModel", 128, **_ENCODER, attention_window=8),
    "Mistral": _text("MistralModel", 128, **_ENCODER, num_key_value_heads=1, use_cache=False),
    "MobileViT": _image(
        "MobileViTModel",
        16,
        64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
        num_attention_heads=2,
        image_size=64,
    ),
    "RegNet": _image(
        "RegNetModel",
        512,
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 2, 1],
        groups_width=8,
    ),
    "Segformer": _image(
        "SegformerForSemanticSegmentation",
        64,
        64,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=32,
    ),
    "Swin": _image(
        "SwinModel",
        64,
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "T5": _pair(
        "T5Model",
        64,
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_heads=2,
    ),
    "ViT": _image("ViTModel", 256, **_WIDTH, **_DEPTH, **_PATCHES),
    "Wav2Vec2": partial(
        _model,
        "Wav2Vec2Model",
        _WIDTH
        | _DEPTH
        | {
            "vocab_size": 32,
            "conv_dim": (32, 32, 32),
            "conv_stride": (5, 2, 2),
            "conv_kernel": (10, 3, 3),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
        },
        {"input_values": _floats(16, 4000)},
    ),
    "Whisper": partial(
        _model,
        "WhisperModel",
        _BOTH
        | {
            "num_mel_bins": 16,
            "max_source_positions": 50,
            "max_target_positions": 32,
            "use_cache": False,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "apply_spec_augment": False,
        },
        {"input_features": _floats(64, 16, 100), "decoder_input_ids": _tokens(64, 16)},
    ),
    "XLNet": _text(
        "XLNetModel",
        128,
        vocab_size=VOCABULARY,
        d_model=64,
        n_layer=2,
        n_head=2,
        d_inner=128,
        use_mems_train=False,
    ),
}

_CHUNKS = "chunks of oneDNN's allocator are larger than the tensors, and the process takes some MB"

#: name: why it takes another peak today than what was predicted
KNOWN: dict[str, str] = {
    **dict.fromkeys(["CLIP", "ConvBert", "GPT2, next words", "Swin"], _CHUNKS),
    **dict.fromkeys("ConvNextV2 MobileViT RegNet Segformer Wav2Vec2".split(), GROUPS),
    "DebertaV2": "9 to 11 MB more than predicted, plain and not, for no known reason",
}
