"""Which fields of a config.json mean something to the model, which nothing, and which are unknown.

A field that is neither is refused: transformers would ignore it, but whoever wrote it had code that
does not, and there is no telling what the model computes without it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

# What every family's configuration in transformers takes, as far as it changes the model.
COMMON_FIELDS = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    }
)  # fmt: skip
# Rope parameters of their own for layers of this kind, where a family has such.
LAYER_KINDS = ("full_attention", "sliding_attention")

# How the weights are stored, in the words of several quantizers.
_QUANTIZED = ("quantization_config", "compression_config", "quantization")

# Of no effect on what a model of transformers computes: names, training, speed,
# what a caller may override, leftovers of transformers' own, and what other classes look at.
_HARMLESS = frozenset(
    {
        # about the files
        "_name_or_path", "name_or_path", "_commit_hash", "_from_model_config", "architectures",
        "auto_map", "dtype", "is_llama_config", "language", "license", "model_name", "model_type",
        "torch_dtype", "transformers.js_config", "transformers_version", "tokenizer_class",
        "unsloth_fixed", "unsloth_version", "vocab_file",
        # training and speed
        "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
        "attn_implementation", "ffn_dim_multiplier", "gradient_checkpointing", "initializer_range",
        "layer_norm_eps", "multiple_of", "neftune_noise_alpha", "pretraining_tp", "torchscript",
        "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn", "use_flash_attn_2",
        "use_unpad", "z_loss_weight", "fused_loss",
        # the tokenizer's
        "bos_token", "eos_token", "pad_token", "unk_token", "max_sequence_length",
        "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side", "prefix",
        # transformers' own, of every model
        "add_cross_attention", "chunk_size_feed_forward", "cross_attention_hidden_size",
        "finetuning_task", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
        "num_labels", "output_attentions", "output_hidden_states", "output_scores", "problem_type",
        "pruned_heads", "return_dict", "return_dict_in_generate", "task_specific_params",
        "tf_legacy_loss", "tie_encoder_decoder",
        # of generation
        "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty",
        "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens",
        "min_length", "min_p", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "remove_invalid_values", "repetition_penalty", "suppress_tokens",
        "temperature", "top_k", "top_p", "typical_p",
        # looked at by other classes of transformers, and by converters
        "max_window_layers", "use_sliding_window",
    }
)  # fmt: skip
_HARMLESS_NAMES = re.compile(r".*_token_ids?|.*dropout|.*dropout_prob|.*_pdrop|unsloth_.*")
# Harmless with these values only: they say what every model here does anyway.
_SAYS_NOTHING_NEW: dict[str, tuple[Any, ...]] = {
    "activation": ("silu", "swiglu"),
    "activation_function": ("silu", "swiglu"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "logits_scaling": (1,),
    "norm_type": ("rms_norm", "rmsnorm"),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("absolute", "rope"),
    "rope_interleaved": (False,),
    "rope_pct": (1,),
    "rotary_pct": (1,),
}
_ROPE_FIELDS = frozenset(
    {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate",
        "attention_factor", "mscale", "mscale_all_dim", "short_factor", "long_factor",
        # what YaRN's first code and others leave there
        "finetuned",
    }
)  # fmt: skip
_MAX_LABELS = 1 << 20
# What has a field without making the model another one: off, absent, empty.
_OFF: tuple[Any, ...] = (None, False, "", [], {})


def check_fields(
    path: Path,
    raw: Mapping[str, Any],
    model_fields: frozenset[str],
    ignored: frozenset[str],
    *,
    mxfp4: bool = False,
) -> None:
    """Raises ModelError, naming the field, for one that may change what the model computes and
    whose meaning is not known, and for weights that the configuration calls quantized.

    model_fields: those that the model's configuration is made from. ignored: those that its class
    in transformers has none of, and other classes have. mxfp4: weights may be quantized so.
    """
    for name in _QUANTIZED:
        quantization = raw.get(name)
        if quantization and not (mxfp4 and _method(quantization) == "mxfp4"):
            raise ModelError(
                f"model {path}: its weights are quantized ({_method(quantization)}) according to "
                f"its {name}, which is not supported for directories; use the original weights or "
                "a GGUF file"
            )
    for name, value in raw.items():
        if name not in model_fields | ignored | set(_QUANTIZED) and not _is_harmless(name, value):
            _refuse(path, name, value)
    # Of no use here, but transformers makes a table of them whenever it reads the file.
    labels = raw.get("num_labels") or 0
    if not isinstance(labels, int) or labels > _MAX_LABELS:
        _refuse(path, "num_labels", labels)
    for block in ("rope_scaling", "rope_parameters"):
        parameters = raw.get(block)
        if isinstance(parameters, dict):
            _check_rope_fields(path, block, parameters)
            for kind in LAYER_KINDS:
                if isinstance(parameters.get(kind), dict):
                    _check_rope_fields(path, f"{block}.{kind}", parameters[kind])


def _check_rope_fields(path: Path, block: str, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        off = _is_off(value) or (name == "partial_rotary_factor" and value == 1)
        if name not in _ROPE_FIELDS and name not in LAYER_KINDS and not off:
            _refuse(path, f"{block}.{name}", value)


def _is_harmless(name: str, value: Any) -> bool:
    if name in _HARMLESS or _HARMLESS_NAMES.fullmatch(name) or _is_off(value):
        return True
    if name == "layer_types":
        return isinstance(value, list) and set(map(str, value)) == {"full_attention"}
    return any(value == harmless for harmless in _SAYS_NOTHING_NEW.get(name, ()))


def _is_off(value: Any) -> bool:
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)


def _refuse(path: Path, name: str, value: Any) -> None:
    shown = str(value)
    raise ModelError(
        f"model {path}: config.json has {name[:100]!r} "
        f"({shown if len(shown) <= 50 else shown[:50] + '...'}), which is not known and may change "
        "what the model computes; if it does not, delete that line"
    )


def _method(quantization: Any) -> str:
    if isinstance(quantization, dict):
        for key in ("quant_method", "format", "bits"):
            if key in quantization:
                value = str(quantization[key])[:50]
                return f"{value} bits" if key == "bits" else value
    return "of an unnamed kind"
