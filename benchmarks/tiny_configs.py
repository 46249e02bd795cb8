"""Shrunken configurations for the architectures of transformers, and inputs for the models they make.

transformers' own script for tiny models takes its sizes from the test suite, which is not installed. Here they come
from the names of a configuration's fields: :data:`SIZES` says how small each is made, fields that it does not name keep
their default, and :data:`SPECIAL` holds what one kind of configuration needs besides. Sub-configurations are shrunk in
the same way.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, LABELS, IMAGE = 2, 16, 128, 4, 32
HIDDEN, INNER, HEADS, HEAD_DIM, LAYERS, EXPERTS, CHOSEN = 64, 96, 4, 16, 1, 4, 2
FIRST_TOKEN, LAST_TOKEN = 16, 96
"""Ids of ordinary tokens; configurations put their special ones below and above."""

SIZES: Mapping[str, int] = {
    name: size
    for size, names in (
        (
            HIDDEN,
            "hidden_size d_model n_embd emb_dim dim d_embed embedding_size embed_dim hidden_dim word_embed_proj_dim "
            "conv_dim hidden_size_per_layer_input out_hidden_size lru_width entity_emb_size attention_hidden_size "
            "input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim d_latents "
            "vision_output_dim projector_input_dim projector_output_dim output_dim embedding_dim encoder_hidden_size "
            "hidden_size_global projection_dim projection_size pooler_output_size prediction_head_size ple_embed_dim "
            "decoder_hidden_size audio_hidden_size cross_attention_hidden_size encoder_hash_byte_group_vocab",
        ),
        (
            INNER,
            "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim d_inner n_inner dim_ff dff "
            "ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp "
            "dense_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size feed_forward_size "
            "mlp_dim prompt_mid_dim shared_intermediate_size expert_intermediate_size t2u_encoder_ffn_dim "
            "t2u_decoder_ffn_dim speech_encoder_intermediate_size",
        ),
        (
            HEADS,
            "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
            "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
            "index_n_heads num_self_attention_heads num_cross_attention_heads conf_num_attention_heads "
            "speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads "
            "linear_num_value_heads linear_num_heads o_groups",
        ),
        (
            2,
            "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads "
            "num_global_key_value_heads",
        ),
        (
            HEAD_DIM,
            "head_dim v_head_dim d_kv d_head swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
            "dim_head kv_channels attention_head_size index_head_dim global_head_dim query_pre_attn_scalar "
            "qk_nope_head_dim kv_lora_rank q_lora_rank o_lora_rank laurel_rank adapter_rank gated_norm_rank "
            "hc_lowrank loop_gate_rank d_rel router_hidden_size embedding_rank",
        ),
        (
            8,
            "qk_rope_head_dim rotary_dim",
        ),
        (
            24,
            "qk_head_dim",
        ),
        (
            LAYERS,
            "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
            "num_decoder_layers num_blocks depth speech_encoder_layers t2u_encoder_layers t2u_decoder_layers "
            "conf_num_hidden_layers num_layers_per_stack num_self_attends_per_block n_input_layers n_recurrent_layers "
            "n_output_layers",
        ),
        (
            EXPERTS,
            "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num",
        ),
        (
            CHOSEN,
            "num_experts_per_tok moe_topk moe_top_k moe_k num_experts_per_token top_k",
        ),
        (
            1,
            "n_group topk_group num_mtp_layers num_nextn_predict_layers n_shared_experts num_shared_experts "
            "moe_num_shared_experts decoder_sparse_step encoder_sparse_step mamba_n_groups n_groups mamba_ngroups "
            "interleave_moe_layer_step no_rope_layer_interval num_sparse_encoder_layers num_sparse_decoder_layers",
        ),
        (  # the layers there are have experts
            0,
            "first_k_dense_replace moe_layer_start_index num_dense_layers",
        ),
        (
            VOCABULARY,
            "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size entity_vocab_size pronunciation_vocab_size "
            "shape_vocab_size vocab_size_per_layer_input char_vocab_size t2u_vocab_size unit_hifi_gan_vocab_size "
            "audio_vocab_size unpadded_vocab_size codebook_size ngram_vocab_size_base",
        ),
        (
            64,
            "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
            "context_length max_encoder_position_embeddings max_decoder_position_embeddings "
            "max_2d_position_embeddings original_max_position_embeddings num_position_embeddings num_latents "
            "num_landmarks segment_means_seq_len",
        ),
        (
            8,
            "sliding_window sliding_window_size attention_chunk_size attention_window local_attention window_size "
            "attention_window_size keep_window_size index_topk local_attention_window_len rel_extent",
        ),
        (
            HEAD_DIM,
            "state_size mamba_d_state ssm_state_size mamba_d_head mamba_head_dim",
        ),
        (
            8,
            "mamba_n_heads mamba_num_heads n_mamba_heads time_step_rank mamba_dt_rank chunk_size mamba_chunk_size "
            "index_block_size",
        ),
        (
            IMAGE,
            "image_size",
        ),
        (
            8,
            "patch_size",
        ),
    )
    for name in names.split()
}
"""Name of a field -> what it is at most."""

STAGES = frozenset(
    ("depths", "num_block_repeats", "stage_num_blocks", "stage_numb_of_layers", "depth", "n_attn_blocks")
)
"""Fields that hold the number of layers in each stage."""
WIDTHS = frozenset((
    "hidden_sizes", "embed_dims", "stage_in_channels", "stage_mid_channels", "stage_out_channels", "neck_hidden_sizes",
    "base_attn_unit_dims",
))  # fmt: skip
"""Fields that hold the width of each stage."""

TOKEN_IDS = ("_token_id", "_token_index", "_index", "_id", "vocab_offset")
RATES = ("drop", "jitter", "mask_time_prob", "mask_feature_prob", "apply_spec_augment", "layerdrop")
"""Parts of the names of fields that make training random."""

FILLED = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "vocab_size")
"""Fields without which no model can be built, even where their default is None."""

_WINDOWS = {
    "embed_dim": 16,
    "num_heads": (1, 2, 4, 8),
    "depths": (1, 1, 1, 1),
    "image_size": 64,
    "patch_size": 2,
    "window_size": 4,
}
_ATTENTION_AT_1 = {"attn_layer_period": 2, "attn_layer_offset": 1}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "albert": {"num_hidden_layers": 2},  # one layer, run twice
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "bit": {"num_groups": 8},
    "blt": {"num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cvt": {"depth": (1, 2, 3)},  # it reads the third of as many rates as its last stage has layers
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "donut-swin": _WINDOWS,
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    "efficientnet": {"hidden_dim": 640, "width_coefficient": 0.5, "depth_coefficient": 0.5, "image_size": 64},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "focalnet": {"embed_dim": 16, "depths": (1, 1, 1, 1), "hidden_sizes": (16, 32, 64, 128), "image_size": 64},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "intermediate_size": [INNER] * 4},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hgnet_v2": {"stage_in_channels": (48, 32, 128, 256)},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "jamba": {"num_hidden_layers": 2, **_ATTENTION_AT_1, "mamba_dt_rank": 8},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": (32, 64, 64), "num_attention_heads": (2, 4, 4),
              "depths": (1, 1, 1), "key_dim": (8, 8, 8)},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mllama_text_model": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64},
    "perceiver": {"num_self_attention_heads": 1, "num_cross_attention_heads": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
                       "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 2, "block_types": ("recurrent", "attention")},
    "reformer": {"num_hidden_layers": 2, "hash_seed": 0, "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32),
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "attn_layers": ("local", "lsh"),
                 "num_buckets": 4, "num_hashes": 1},
    "rwkv": {"num_hidden_layers": 2},
    "shieldgemma2": {"yes_token_index": FIRST_TOKEN, "no_token_index": FIRST_TOKEN + 1},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {"hidden_sizes": (64, 16, 16, 32, 32), "image_size": (64, 64)},
    "xlstm": {"chunk_size": 16, "mode": "train", "autocast_kernel_dtype": "float32"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM, "num_hidden_layers": 4,
              "layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip
"""Model type -> fields, where the sizes above do not fit together."""


def shrink(default: Any, more: Mapping[str, Any] | None = None) -> Any:
    """A configuration of the kind of ``default`` for a tiny model; ``more`` fields have the last word."""
    kind = type(default)
    untouched = kind()
    special = {**SPECIAL.get(default.model_type, {}), **(more or {})}
    fields = dict(_fields(default))
    options: dict[str, Any] = {}
    taken: dict[int, int] = {}
    for name, value in fields.items():
        if hasattr(value, "model_type") and isinstance(special.get(name), Mapping) and value.model_type:
            options[name] = shrink(value, special.pop(name))
            continue
        small = _small(name, value, taken)
        if hasattr(value, "model_type") or small != value or value != getattr(untouched, name, None):
            options[name] = small
    options |= _layers({name: value for name, value in fields.items() if name not in special})
    if fields.get("num_key_value_heads") and fields["num_key_value_heads"] == fields.get("num_attention_heads"):
        options["num_key_value_heads"] = options.get("num_attention_heads")  # no grouped queries: none here either
    return kind(**(options | special))


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        if field.name not in ("chunk_size_feed_forward", "id2label", "label2id") and not field.name.startswith("_"):
            try:
                yield field.name, getattr(config, field.name, None)
            except RuntimeError:  # its layers differ in it: the configuration works out their values anew
                yield field.name, field.default


def _small(name: str, value: Any, taken: dict[int, int]) -> Any:
    """``value`` of the field ``name``, made small."""
    if hasattr(value, "model_type"):
        return shrink(value)
    if isinstance(value, bool | float) and any(part in name for part in RATES):
        return type(value)(0)
    if value is None and name in FILLED:
        return SIZES[name]
    if isinstance(value, bool) or value is None:
        return False if name == "use_cache" else value
    if isinstance(value, int) and name.endswith(TOKEN_IDS):
        if value >= LAST_TOKEN:
            value = taken.setdefault(value, VOCABULARY - 1 - len(taken))
        return value
    if isinstance(value, int) and name in SIZES:
        return min(value, SIZES[name])
    if name in STAGES and isinstance(value, list | tuple):
        return type(value)(1 for _ in value)
    if name in WIDTHS and isinstance(value, list | tuple):
        return type(value)(max(8, width // 4 // 8 * 8) for width in value)
    if name == "rope_parameters":
        return _rope(value)
    return value


def _rope(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    small = {key: _rope(inner) for key, inner in value.items()}
    if "mrope_section" in small:
        small["mrope_section"] = [2, 3, 3]
    return small


def _layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with one entry per layer, cut down to one layer of each kind, and the number of those layers."""
    depths = [name for name in fields if SIZES.get(name) == LAYERS and isinstance(fields[name], int)]
    for depth in depths:
        lists = {
            name: value
            for name, value in fields.items()
            if isinstance(value, list | tuple) and len(value) == fields[depth] > LAYERS
        }
        if not lists:
            continue
        kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
        chosen = sorted({kind: kinds.index(kind) for kind in kinds}.values())
        return {depth: len(chosen)} | {name: [value[at] for at in chosen] for name, value in lists.items()}
    return {}


def inputs(model: nn.Module, task: str) -> dict[str, Any]:
    """Random arguments of the model's forward for a training step."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    kind = config.model_type
    made: dict[str, Any] = {}
    if task == "image-classification" and kind not in ("imagegpt", "shieldgemma2"):  # those read tokens
        made["pixel_values"] = _images(config)
        if kind == "siglip2":
            side = config.vision_config.patch_size
            made["pixel_values"] = torch.randn(BATCH, 16, 3 * side * side)
            made["pixel_attention_mask"] = torch.ones(BATCH, 16, dtype=torch.long)
            made["spatial_shapes"] = torch.tensor([[4, 4]] * BATCH)
        labels = torch.randint(0, LABELS, (BATCH,))
    else:
        made["input_ids"] = _tokens(model, config)
        labels = made["input_ids"].clone() if task != "image-classification" else torch.randint(0, LABELS, (BATCH,))
        if kind.startswith("musicgen"):  # codebooks in the batch dimension
            made["input_ids"] = made["input_ids"].repeat_interleave(config.num_codebooks, 0)
            labels = labels[..., None].repeat(1, 1, config.num_codebooks)
        if kind == "git":
            made["pixel_values"] = _images(config.vision_config)
    if "labels" in accepted and kind != "shieldgemma2":  # its labels would be those of a language model
        made["labels"] = labels
    return made


def _tokens(model: nn.Module, config: Any) -> Tensor:
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    known = getattr(embeddings, "num_embeddings", VOCABULARY)
    length = config.max_position_embeddings if config.model_type == "perceiver" else LENGTH  # it takes no other length
    return torch.randint(min(FIRST_TOKEN, known // 4), min(LAST_TOKEN, known), (BATCH, length))


def _images(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", IMAGE)
    return torch.randn(BATCH, getattr(vision, "num_channels", 3), *((size, size) if isinstance(size, int) else size))


def no_dropout(model: nn.Module) -> None:
    """Switch off what is random in training and does not come from the configuration."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def build(task: str, model_type: str, class_name: str) -> nn.Module:
    """A tiny model of a class of transformers, in train mode, from the random state there is."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = shrink(CONFIG_MAPPING[model_type]())
    kind = getattr(transformers, class_name)
    if not isinstance(config, kind.config_class):  # one of its parts, as transformers.AutoModel takes it
        parts = (getattr(config, name, None) for name in config.sub_configs)
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    if task == "image-classification":
        config.num_labels, config.problem_type = LABELS, "single_label_classification"
    if task == "causal-lm" and hasattr(config, "is_decoder") and model_type == "reformer":
        config.is_decoder = True
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
        config.pad_token_id = 0
    model: nn.Module = kind(config).train()
    no_dropout(model)
    return model
