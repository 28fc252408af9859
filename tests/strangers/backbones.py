"""The backbones and some language models of keras-hub in small, with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import keras_hub
import numpy as np
from keras_hub.src.models.stable_diffusion_3.t5_encoder import T5Encoder
from keras_hub.src.models.vae.vae_backbone import VAEBackbone

BATCH, LENGTH, SIZE, VOCABULARY = 2, 8, 32, 64
IMAGE = (SIZE, SIZE, 3)
LAYER_TYPES = ["sliding_attention", "full_attention"]

#: value: the parameters that get it in every class that has one of that name
_SMALL: list[tuple[Any, str]] = [
    (True, "use_bias guidance_embed use_p5 use_fpn_batch_norm use_learnable_affine_block"),
    (True, "use_post_ffw_norm use_post_attention_norm use_sliding_window_attention down_growth"),
    (True, "use_patch_bias use_class_token use_mha_bias use_mlp_bias enable_moe_block"),
    (False, "learn_initial_query attention_bias mlp_bias depthwise_residual"),
    (0, "num_denoising pad_token_id seed"),
    (0.02, "initializer_range"),
    (0.1, "dropout dropout_rate attention_dropout drop_path max_drop_path_rate"),
    (0.5, "squeeze_and_excite"),
    (1, "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads"),
    (1, "linear_num_key_heads num_spatial_layers num_temporal_layers num_auxiliary_layers"),
    (1, "num_text_layers depth depth_single_blocks depth_multiplier num_encoder_layers"),
    (1, "partial_rotary_factor num_classes stem_strides image_token_id"),
    (2, "num_layers num_layers_enc num_layers_dec num_hidden_layers mmdit_num_layers"),
    (2, "encoder_num_layers decoder_num_layers num_decoder_layers vit_num_layers num_lqe_layers"),
    (2, "num_heads num_query_heads num_attention_heads encoder_num_heads decoder_num_heads"),
    (2, "encoder_num_attention_heads decoder_num_attention_heads decoder_attention_heads"),
    (2, "num_decoder_heads vit_num_heads mmdit_num_heads linear_num_value_heads num_frames top_k"),
    (2, "num_experts_per_token mmdit_patch_size pool_size num_query_tokens mlp_ratio"),
    (2, "altup_num_inputs laurel_rank num_register_tokens num_feature_levels depthwise_stride"),
    (2, "hidden_expansion cross_attention_frequency iou_head_depth num_multimask_outputs"),
    (3, "stem_kernel_size num_upsampling_stages roi_size min_level"),
    (4, "num_experts window_size sliding_window sliding_window_size hidden_size_per_layer_input"),
    (4, "num_queries num_labels latent_channels upsampling_size"),
    (6, "max_level"),
    (8, "head_dim head_size encoder_head_dim decoder_head_dim linear_key_head_dim num_mels"),
    (8, "linear_value_head_dim patch_size vit_patch_size mmdit_position_size stem_filters"),
    (8, "growth_rate mask_in_channels iou_head_hidden_dim embedding_size depthwise_filters"),
    (8, "head_hidden_dim max_label_length projection_filters num_output_channels"),
    (16, "hidden_dim hidden_size embedding_dim encoder_hidden_dim decoder_hidden_dim embed_dim"),
    (16, "text_hidden_size vit_hidden_dim projection_dim output_dim vision_dim fusion_hidden_dim"),
    (16, "filter_dim mmdit_hidden_dim lqe_hidden_dim fpn_hidden_dim vision_hidden_size"),
    (16, "qformer_hidden_dim num_features output_num_filters last_layer_filter"),
    (16, "vision_soft_tokens_per_image gate_lora mv_lora aaa_lora decay_lora"),
    (32, "intermediate_dim moe_intermediate_dim shared_expert_intermediate_dim mlp_dim"),
    (32, "shared_expert_intermediate_size encoder_intermediate_dim decoder_intermediate_dim"),
    (32, "decoder_mlp_dim vit_intermediate_dim encoder_ffn_dim decoder_ffn_dim"),
    (32, "expert_intermediate_dim max_position_embeddings max_sequence_length"),
    (VOCABULARY, "vocabulary_size vocab_size text_vocab_size vocab_size_per_layer_input"),
    (1e-5, "layer_norm_epsilon"),
    (1e4, "rope_theta theta"),
    (SIZE, "image_size"),
    (IMAGE, "image_shape input_shape pretrain_image_shape position_embedding_shape"),
    ((SIZE, SIZE), "input_image_size anchor_image_size"),
    (LAYER_TYPES, "encoder_layer_types decoder_layer_types"),
]
SMALL = {name: value for value, names in _SMALL for name in names.split()}


def small(kind: str | type, **more: Any) -> Any:
    """One of that class, from `more`, then MORE, then what it takes of SMALL."""
    named = kind if isinstance(kind, str) else ""
    cls: Any = getattr(keras_hub.models, named, None) or getattr(keras_hub.layers, named, kind)
    takes = inspect.signature(cls.__init__).parameters
    common = {name: value for name, value in SMALL.items() if name in takes}
    return cls(**common | MORE.get(cls.__name__, dict)() | more)


def _parts(prefix: str, names: str = "vision_encoder text_encoder") -> dict[str, Any]:
    return {name: small(prefix + name.title().replace("_", "")) for name in names.split()}


def _resnet(**more: Any) -> keras.Model:
    return small("ResNetBackbone", block_type="basic_block", use_pre_activation=False, **more)


def _mobilenet_v5() -> dict[str, Any]:
    blocks = dict(
        block_types=("er", "uir", "uir", "mqa"),
        act_layers=("gelu", "gelu", "gelu", "gelu"),
        num_filters=(8, 16, 16, 16),
        strides=(2, 2, 1, 1),
        exp_ratios=(2, 2, 2, 0),
        se_ratios=(0, 0, 0, 0),  # another fails on the default normalisation
        dw_kernel_sizes=(0, 3, 3, 0),
        dw_start_kernel_sizes=(0, 3, 0, 0),
        dw_end_kernel_sizes=(0, 3, 0, 0),
        exp_kernel_sizes=(3, 0, 0, 0),
        pw_kernel_sizes=(1, 0, 0, 0),
        num_heads=(0, 0, 0, 2),
        key_dims=(0, 0, 0, 8),
        value_dims=(0, 0, 0, 8),
        kv_strides=(0, 0, 0, 2),
        use_cpe=(False, False, False, False),
    )
    stages = {f"stackwise_{name}": [[a, b], [c, d]] for name, (a, b, c, d) in blocks.items()}
    return stages | dict(stackwise_num_blocks=[2, 2], msfa_output_resolution=4)


def _stable_diffusion_3() -> dict[str, Any]:
    filters, blocks = [32] * 4, [1] * 4
    return dict(
        vae=VAEBackbone(filters, blocks, filters, blocks, sample_channels=8),
        clip_l=small("CLIPTextEncoder", name="clip_l", intermediate_output_index=-2),
        clip_g=small("CLIPTextEncoder", name="clip_g", intermediate_output_index=-2),
        t5=small(T5Encoder, hidden_dim=32),
        mmdit_qk_norm="rms_norm",
        mmdit_dual_attention_indices=(0,),
    )


#: class: what it takes besides SMALL
MORE: dict[str, Callable[[], dict[str, Any]]] = {
    "BASNetBackbone": lambda: dict(
        image_encoder=_resnet(image_shape=(None, None, 3)), projection_filters=64
    ),
    "BLIP2Backbone": lambda: dict(
        vision_encoder=small("BLIP2VisionEncoder"),
        qformer=small("BLIP2QFormer"),
        language_model=small("BLIP2CustomOPT"),
    ),
    "CLIPBackbone": lambda: _parts("CLIP"),
    "CSPNetBackbone": lambda: (
        dict(block_type="dark_block", stage_type="csp", stackwise_num_filters=[16, 32])
        | dict(stackwise_depth=[1, 2], stackwise_strides=[1, 2], bottle_ratio=[0.5, 1.0])
        | dict(block_ratio=[1.0, 0.5], expand_ratio=[2.0, 1.0])
    ),
    "DFineBackbone": lambda: (
        dict(backbone=small("HGNetV2Backbone"), out_features=["stage2", "stage3"])
        | dict(feat_strides=[8, 16], decoder_in_channels=[16, 16], encoder_in_channels=[16, 32])
        | dict(encode_proj_layers=[1], decoder_n_points=[2, 2], eval_idx=-1)
    ),
    "DeepLabV3Backbone": lambda: (
        dict(image_encoder=_resnet(), dilation_rates=[1, 2])
        | dict(low_level_feature_key="P2", spatial_pyramid_pooling_key="P4")
    ),
    "DenseNetBackbone": lambda: dict(stackwise_num_repeats=[2, 2]),
    "DepthAnythingBackbone": lambda: (
        dict(image_encoder=small("DINOV2Backbone", num_layers=4, image_shape=(64, 64, 3)))
        | dict(reassemble_factors=[4, 2, 1, 0.5], neck_hidden_dims=[8, 8, 16, 16])
        | dict(head_in_index=-1, feature_keys=["stage1", "stage2", "stage3", "stage4"])
    ),
    "EfficientNetBackbone": lambda: (
        dict(stackwise_block_types=["fused", "unfused", "v1", "cba"])
        | dict(stackwise_kernel_sizes=[3, 3, 5, 3], stackwise_num_repeats=[1, 2, 2, 1])
        | dict(stackwise_input_filters=[8, 8, 16, 16], stackwise_output_filters=[8, 16, 16, 16])
        | dict(stackwise_expansion_ratios=[2, 2, 2, 1], stackwise_strides=[1, 2, 2, 1])
        | dict(stackwise_squeeze_and_excite_ratios=[0, 0.25, 0.25, 0])
        | dict(width_coefficient=1.0, depth_coefficient=1.0)
    ),
    "FluxBackbone": lambda: (
        dict(input_channels=4, axes_dim=[4, 2, 2], y_shape=(16,), image_shape=(16, 4))
        | dict(image_ids_shape=(16, 3), text_shape=(LENGTH, 16), text_ids_shape=(LENGTH, 3))
    ),
    "Gemma3Backbone": lambda: dict(vision_encoder=small("Gemma3VisionEncoder")),
    "Gemma3nBackbone": lambda: (
        dict(vision_encoder_config=small("MobileNetV5Backbone").get_config())
        | dict(hidden_activation="gelu_approximate", intermediate_size=[32, 32])
        | dict(layer_types=LAYER_TYPES)
    ),
    "Gemma4Backbone": lambda: dict(
        vision_encoder=small("Gemma4VisionEncoder"), layer_types=LAYER_TYPES
    ),
    "HGNetV2Backbone": lambda: (
        dict(depths=[1, 1, 2], hidden_sizes=[16, 16, 32], stem_channels=[3, 8, 8])
        # channels in, in the middle and out, blocks, layers of a block, kernel
        | dict(
            stackwise_stage_filters=[
                (8, 8, 16, 1, 2, 3),
                (16, 8, 16, 1, 2, 3),
                (16, 8, 32, 2, 2, 5),
            ]
        )
        | dict(apply_downsample=[False, True, True], hidden_act="relu")
        | dict(use_lightweight_conv_block=[False, True, True])
    ),
    "MetaCLIP2Backbone": lambda: _parts("MetaCLIP2"),
    "MiTBackbone": lambda: (
        dict(num_layers=4, hidden_dims=[8, 16, 24, 32], layerwise_depths=[1, 1, 1, 2])
        | dict(layerwise_num_heads=[1, 1, 2, 2], layerwise_sr_ratios=[4, 2, 1, 1])
        | dict(layerwise_patch_sizes=[7, 3, 3, 3], layerwise_strides=[2, 2, 2, 2])
    ),
    "MobileNetBackbone": lambda: (
        dict(stackwise_expansion=[[16], [32, 32]], stackwise_num_blocks=[1, 2])
        | dict(stackwise_num_filters=[[8], [16, 16]], stackwise_kernel_size=[[3], [5, 5]])
        | dict(stackwise_num_strides=[[2], [2, 1]], stackwise_padding=[[1], [2, 2]])
        | dict(stackwise_activation=[["relu"], ["hard_swish", "hard_swish"]])
        | dict(stackwise_se_ratio=[[None], [0.25, 0.25]])
    ),
    "MobileNetV5Backbone": _mobilenet_v5,
    "PARSeqBackbone": lambda: dict(image_encoder=small("ViTBackbone")),
    "Qwen3_5Backbone": lambda: dict(layer_types=["linear_attention", "full_attention"]),
    "Qwen3_5MoeBackbone": lambda: dict(layer_types=["linear_attention", "full_attention"]),
    "ResNetBackbone": lambda: (
        dict(input_conv_filters=[64], input_conv_kernel_sizes=[3])
        | dict(block_type="bottleneck_block", use_pre_activation=True)
        | dict(stackwise_num_filters=[64, 16, 16, 16], stackwise_num_blocks=[2, 1, 1, 1])
        | dict(stackwise_num_strides=[1, 2, 2, 2])
    ),
    "RetinaNetBackbone": lambda: dict(image_encoder=_resnet()),
    "SAM3PromptableConceptBackbone": lambda: (
        _parts("SAM3") | _parts("SAM3", "geometry_encoder detr_encoder detr_decoder mask_decoder")
    ),
    "SAM3VisionEncoder": lambda: dict(
        window_size=2, global_attn_indexes=[1], fpn_scale_factors=[4.0, 2.0, 1.0, 0.5]
    ),
    "SAMBackbone": lambda: dict(
        image_encoder=small("ViTDetBackbone"),
        prompt_encoder=small("SAMPromptEncoder", image_embedding_size=(4, 4)),
        mask_decoder=small("SAMMaskDecoder"),
    ),
    "SegFormerBackbone": lambda: dict(image_encoder=small("MiTBackbone")),
    "SigLIPBackbone": lambda: _parts("SigLIP"),
    "SmolLM3Backbone": lambda: dict(
        rope_layer_enabled_list=[True, False], layer_types=["attention", "attention"]
    ),
    "StableDiffusion3Backbone": _stable_diffusion_3,
    "SwinTransformerBackbone": lambda: dict(depths=(2, 2), num_heads=(2, 4), patch_size=2),
    "VGGBackbone": lambda: dict(stackwise_num_repeats=[1, 2], stackwise_num_filters=[8, 16]),
    "ViTDetBackbone": lambda: dict(global_attention_layer_indices=[1]),
    "XceptionBackbone": lambda: dict(
        stackwise_conv_filters=[[8, 16], [32, 32], [32, 32]], stackwise_pooling=[True, True, False]
    ),
}

#: (backbone, input): its shape, where a dimension left open is not LENGTH
SHAPES: dict[tuple[str, str], tuple[int, ...]] = {
    ("Gemma3Backbone", "images"): (1, *IMAGE),
    ("Gemma3Backbone", "vision_indices"): (4,),
    ("Gemma3nBackbone", "images"): (1, *IMAGE),
    ("Gemma4Backbone", "pixel_position_ids"): (1, 16, 2),
    ("Gemma4Backbone", "pixel_values"): (1, 16, 3 * 8 * 8),
    ("Gemma4Backbone", "vision_indices"): (4,),
    ("MoonshineBackbone", "encoder_input_values"): (1500, 1),
    ("MoonshineBackbone", "encoder_padding_mask"): (1500,),
    ("SAM3PromptableConceptBackbone", "boxes"): (1, 5),
    ("SAM3PromptableConceptBackbone", "box_labels"): (1,),
    ("SAMBackbone", "masks"): (1, 16, 16, 1),
    ("SigLIPBackbone", "token_ids"): (32,),
}


def _random(backbone: str, name: str, spec: Any, batch: int) -> np.ndarray:
    """A value for that input; tokens, labels and indices are in range."""
    rng = np.random.default_rng(0)
    shape = batch, *SHAPES.get((backbone, name), [size or LENGTH for size in spec.shape[1:]])
    if name == "pixel_position_ids":  # (x, y) of the patches
        return np.broadcast_to(np.indices((4, 4), "int32").reshape(2, -1).T, shape)
    if name in ("vision_indices", "position_ids"):
        return np.broadcast_to(np.arange(shape[1], dtype="int32"), shape)
    if name.endswith("_mask") or name in ("labels", "box_labels", "num_steps"):
        return np.ones(shape, spec.dtype)
    if spec.dtype == "int32":
        return rng.integers(0, 2 if name == "segment_ids" else VOCABULARY, shape, "int32")
    return rng.random(shape, "float32")


def _backbone(name: str, batch: int = BATCH) -> tuple[keras.Model, Any]:
    """The model, and inputs for a batch in the structure that it takes."""
    model = small(name)
    if hasattr(model, "configure_scheduler"):
        model.configure_scheduler(2)
    inputs = model.input
    if isinstance(inputs, dict):
        return model, {key: _random(name, key, spec, batch) for key, spec in inputs.items()}
    if isinstance(inputs, list):
        return model, [_random(name, spec.name, spec, batch) for spec in inputs]
    return model, _random(name, inputs.name, inputs, batch)


#: name: why there is no such model in BACKBONES
SKIPPED: dict[str, str] = {"Backbone": "abstract", "FeaturePyramidBackbone": "abstract"}

#: name: builds the model and inputs; without aliases of a class
BACKBONES: dict[str, Callable[..., tuple[keras.Model, Any]]] = {
    name: partial(_backbone, name)
    for name, cls in sorted(vars(keras_hub.models).items())
    if name.endswith("Backbone") and cls.__name__ == name and name not in SKIPPED
}


def _causal(name: str, batch: int = BATCH) -> tuple[keras.Model, dict[str, np.ndarray], np.ndarray]:
    """A compiled language model, inputs and labels, for `model.fit(x, y)`."""
    backbone, x = _backbone(f"{name}Backbone", batch)
    model = getattr(keras_hub.models, f"{name}CausalLM")(backbone, preprocessor=None)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, x, np.roll(x["token_ids"], -1, 1)


CAUSAL = {name: partial(_causal, name) for name in ("GPT2", "Gemma", "Llama3", "QwenMoe")}
