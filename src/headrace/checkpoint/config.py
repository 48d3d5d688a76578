"""The model's configuration, from a Hugging Face directory or a GGUF file."""

import json
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.gguf_tokenizer import end_ids
from headrace.errors import ModelError
from headrace.protocol.model_config import ModelConfig, RopeConfig

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_SUPPORTED_GGUF_ARCHITECTURES = ("llama",)
_SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


def config_from_huggingface(path: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a model directory.

    Raises ModelError for damaged files and for what is not supported, naming it.
    """
    raw = _read_json(path / "config.json")
    names = raw.get("architectures") or []
    if not any(name in SUPPORTED_ARCHITECTURES for name in names):
        raise ModelError(
            f"model {path}: architecture {', '.join(map(str, names)) or '(none named)'} is not "
            f"supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "of an unnamed kind")
        raise ModelError(
            f"model {path}: its weights are quantized ({method}), which is not supported for "
            "directories; use the original weights or a GGUF file"
        )
    # Slow to import, and only this kind of model needs it.
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"model {path}: config.json cannot be used: {_one_line(error)}") from error
    if config.hidden_act != "silu":
        raise ModelError(
            f"model {path}: activation {config.hidden_act} is not supported, only silu"
        )
    dtype = str(config.dtype).removeprefix("torch.") if config.dtype else "float32"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _checked(
        path,
        ModelConfig(
            architecture=next(name for name in names if name in SUPPORTED_ARCHITECTURES),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_epsilon=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            tied_head=bool(config.tie_word_embeddings),
            attention_bias=bool(getattr(config, "attention_bias", False)),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            sliding_window=getattr(config, "sliding_window", None),
            rope=_rope_from_huggingface(path, config),
            dtype=dtype,
            eos_token_ids=_eos_ids(path, config.eos_token_id),
        ),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata of a GGUF file. Raises ModelError for what is missing or unsupported.

    Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    architecture = str(file.metadata.get("general.architecture", "(none named)"))
    if architecture not in _SUPPORTED_GGUF_ARCHITECTURES:
        raise ModelError(
            f"model {file.path}: GGUF architecture {architecture} is not supported; supported are "
            f"{', '.join(_SUPPORTED_GGUF_ARCHITECTURES)}"
        )

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"model {file.path}: metadata {architecture}.{key} is missing")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelError(
                f"model {file.path}: metadata {architecture}.{key} is not of type {kind.__name__}"
            )
        return value

    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"model {file.path}: one part of a split GGUF file: merge the parts "
            "(llama-gguf-split --merge) and give the whole file"
        )
    if get("expert_count", int, 0) > 0:
        raise ModelError(f"model {file.path}: mixture-of-experts layers are not supported")

    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    if heads < 1:
        raise ModelError(f"model {file.path}: {architecture}.attention.head_count is {heads}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"model {file.path}: tensor token_embd.weight is missing")
    head_dim = get("attention.key_length", int, hidden // heads)
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"model {file.path}: rotating only part of each head is not supported")
    context = get("context_length", int)
    # A factor without a type, or under its old name, means linear.
    factor = get("rope.scaling.factor", float, get("rope.scale_linear", float, 0.0))
    scaling = get("rope.scaling.type", str, "linear" if factor else "none")
    rope = RopeConfig(
        theta=get("rope.freq_base", float, 10000.0),
        kind=_gguf_rope_kind(file, scaling),
        factor=factor or 1.0,
        original_max_positions=get("rope.scaling.original_context_length", int, context),
        beta_fast=get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=get("rope.scaling.yarn_beta_slow", float, 1.0),
        attention_factor=get("rope.scaling.attn_factor", float, 0.0) or None,
    )
    return _checked(
        file.path,
        ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length", int),
            num_layers=get("block_count", int),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            rms_norm_epsilon=get("attention.layer_norm_rms_epsilon", float),
            max_positions=context,
            tied_head="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            sliding_window=None,
            rope=rope,
            dtype="float32" if embedding.kind == GGMLQuantizationType.F32 else "bfloat16",
            eos_token_ids=end_ids(file),
        ),
    )


def _checked(path: Path, config: ModelConfig) -> ModelConfig:
    sizes = {
        name: getattr(config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_positions",
        )
    }  # fmt: skip
    for name, value in sizes.items():
        if value < 1:
            raise ModelError(f"model {path}: {name} is {value}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"model {path}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"model {path}: head_dim {config.head_dim} is odd, rotation needs pairs")
    return config


def _gguf_rope_kind(file: GgufFile, scaling: str) -> str:
    if scaling == "none":
        return "default"
    if scaling not in _SUPPORTED_ROPE:
        raise ModelError(
            f"model {file.path}: rope scaling {scaling} is not supported; supported are "
            f"{', '.join(_SUPPORTED_ROPE)}"
        )
    return scaling


def _rope_from_huggingface(path: Path, config: Any) -> RopeConfig:
    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _SUPPORTED_ROPE:
        raise ModelError(
            f"model {path}: rope scaling {kind} is not supported; supported are "
            f"{', '.join(_SUPPORTED_ROPE)}"
        )
    names = {
        "theta": "rope_theta",
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    }
    given = {ours: parameters[name] for ours, name in names.items() if parameters.get(name)}
    if "truncate" in parameters:
        given["truncate"] = bool(parameters["truncate"])
    original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return RopeConfig(kind=kind, original_max_positions=original, **given)


def _eos_ids(path: Path, from_config: int | list[int] | None) -> tuple[int, ...]:
    """All end-of-text tokens; generation_config.json wins, as it does in transformers."""
    found = from_config
    if (path / "generation_config.json").is_file():
        found = _read_json(path / "generation_config.json").get("eos_token_id", from_config)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
