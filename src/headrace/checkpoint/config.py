"""The model's configuration, from a Hugging Face directory or a GGUF file."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGMLQuantizationType

from headrace.checkpoint.config_fields import LLAMA_FIELDS, MISTRAL_FIELDS, check_fields
from headrace.checkpoint.generation_config import generation_config, token_ids
from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.gguf_tokenizer import end_ids
from headrace.checkpoint.json_file import one_line, read_json_object
from headrace.checkpoint.llama_tensors import check_tensors, gguf_name
from headrace.checkpoint.safetensors_files import StoredTensor, stored_tensors
from headrace.errors import ModelError
from headrace.protocol.model_config import ModelConfig, RopeConfig

_log = logging.getLogger(__name__)

# What a model is: by the name that its configuration calls itself, and of what that is made.
_FAMILIES = {
    "llama": ("LlamaForCausalLM", LLAMA_FIELDS),
    "mistral": ("MistralForCausalLM", MISTRAL_FIELDS),
}
SUPPORTED_ARCHITECTURES = tuple(architecture for architecture, _ in _FAMILIES.values())
# The same tensors without an output projection of their own: transformers loads them all the same.
_BASE_MODELS = {"LlamaModel": "llama", "MistralModel": "mistral"}
_SUPPORTED_GGUF_ARCHITECTURES = ("llama",)
_SUPPORTED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
_SUPPORTED_GGUF_ROPE = ("none", "linear", "yarn")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# More than any number of a model, and few enough for arithmetic.
_IMPLAUSIBLE = 1 << 40
# Metadata under the architecture's name that llama.cpp reads for a Llama model, besides those read
# here, or that change nothing (llama-model.cpp and llama-hparams.h there).
_HARMLESS_GGUF_KEYS = frozenset(
    {
        "vocab_size", "expert_used_count", "tensor_data_layout", "rope.scaling.finetuned",
        "attention.layer_norm_epsilon", "attention.sliding_window",
    }
)  # fmt: skip


def config_from_huggingface(path: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a model directory.

    What it says is held against the headers of the weights. Runs no code of the directory's. Raises
    ModelError for damaged files and for what is not supported, naming it.
    """
    raw = read_json_object(path / "config.json")
    _refuse_other_kinds(path)
    # First what the model is: whatever else is wrong matters less.
    family = _family(path, raw)
    tensors = stored_tensors(path)
    config = huggingface_config(path, raw, family, tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    unused = check_tensors(path, config, shapes)
    for name in shapes.keys() - set(unused):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"model {path}: tensor {name} is stored as {tensor.dtype}; supported are "
                f"{', '.join(_DTYPES)}"
            )
    # Older files hold what follows from the configuration.
    unused = [name for name in unused if not name.endswith("rotary_emb.inv_freq")]
    if unused:
        _log.warning(
            f"model {path}: {len(unused)} of its tensors are not used, as a {config.architecture} "
            f"has none such: {unused[0][:100]!r}"
        )
    if raw.get("auto_map"):
        _log.warning(f"model {path}: its own code (auto_map) is not run; it may differ")
    return config


def huggingface_config(
    path: Path, raw: Mapping[str, Any], family: str, tensors: Mapping[str, StoredTensor]
) -> ModelConfig:
    """What a config.json says of a model with these tensors, whose shapes are not looked at.

    Equal to what transformers makes of it; ModelError for what that would not be.
    """
    architecture, fields = _FAMILIES[family]
    check_fields(path, raw, fields)
    config = _transformers_config(path, family, {k: v for k, v in raw.items() if k in fields})
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(
            f"model {path}: activation {config.hidden_act} is not supported, only silu"
        )
    head = "lm_head.weight" in tensors
    rope = _rope_from_huggingface(path, config)
    window = config.sliding_window if family == "mistral" else None
    checked = _checked(
        path,
        ModelConfig(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_epsilon=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            # One of its own counts, if it is there.
            tied_head=bool(config.tie_word_embeddings) and not head,
            attention_bias=family == "llama" and bool(config.attention_bias),
            mlp_bias=family == "llama" and bool(config.mlp_bias),
            sliding_window=window,
            full_attention_layers=_full_attention_layers(path, raw, config) if window else (),
            rope=rope,
            dtype=_dtype(path, raw, tensors),
            eos_token_ids=_eos_ids(path, raw.get("eos_token_id", 2)),
        ),
    )
    return _with_linear_context(checked)


def _refuse_other_kinds(path: Path) -> None:
    """Directories that are no model by themselves, or whose weights are not what they seem."""
    for name, what in {
        "adapter_config.json": "holds an adapter (LoRA), which is no model by itself: merge it "
        "into its base model (merge_and_unload of peft) and give that",
        "quantize_config.json": "has weights quantized by GPTQ (quantize_config.json), which are "
        "not supported for directories; use the original weights or a GGUF file",
        "quant_config.json": "has quantized weights (quant_config.json), which are not supported "
        "for directories; use the original weights or a GGUF file",
    }.items():
        if (path / name).is_file():
            raise ModelError(f"model {path}: the directory {what}")


def _family(path: Path, raw: Mapping[str, Any]) -> str:
    """llama or mistral: by model_type, as in transformers, or else by its architectures."""
    names = raw.get("architectures") or []
    names = list(map(str, names)) if isinstance(names, list) else [str(names)]
    of_name = {architecture: family for family, (architecture, _) in _FAMILIES.items()}
    of_name |= _BASE_MODELS
    model_type = str(raw.get("model_type") or "")
    known = [of_name[name] for name in names if name in of_name]
    if (not names or known) and model_type in _FAMILIES:
        return model_type
    if known and not model_type:
        return known[0]
    called = ", ".join(names)[:200] or "(none named)"
    if known or not names:
        called += f" with model_type {model_type[:100]!r}"
    own = " (and needs code of its own, auto_map, which is never run)" * bool(raw.get("auto_map"))
    raise ModelError(
        f"model {path}: architecture {called}{own} is not supported; supported are "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _transformers_config(path: Path, family: str, fields: dict[str, Any]) -> Any:
    """transformers' own reading of these fields: defaults, types, and all ways to write rope."""
    # Slow to import, and only this kind of model needs it.
    from transformers import LlamaConfig, MistralConfig

    kinds: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig}
    given = {name: value for name, value in fields.items() if name != "layer_types"}
    try:
        return kinds[family](**given)
    except Exception as error:
        raise ModelError(f"model {path}: config.json cannot be used: {one_line(error)}") from error


def _full_attention_layers(path: Path, raw: Mapping[str, Any], config: Any) -> tuple[int, ...]:
    """The layers that a Mistral model's layer_types take out of its sliding window."""
    types = raw.get("layer_types")
    if types is None:
        return ()
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise ModelError(f"model {path}: layer_types may hold {' and '.join(known)} only")
    if len(types) != config.num_hidden_layers:
        raise ModelError(
            f"model {path}: layer_types has {len(types)} entries for {config.num_hidden_layers} "
            "layers"
        )
    return tuple(number for number, kind in enumerate(types) if kind == known[0])


def _dtype(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """The weights' dtype by the configuration, or else by the first of them, as in transformers."""
    named = raw.get("dtype") or raw.get("torch_dtype")
    if named is None:
        return next((_DTYPES[t.dtype] for t in tensors.values() if t.dtype in _DTYPES), "float32")
    dtype = str(named).removeprefix("torch.")
    if dtype not in _DTYPES.values():
        raise ModelError(
            f"model {path}: dtype {dtype[:50]} is not supported; supported are "
            f"{', '.join(_DTYPES.values())}"
        )
    return dtype


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata of a GGUF file, and hold them against its tensors.

    Raises ModelError for what is missing or unsupported.
    Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    _refuse_other_gguf_files(file)
    architecture = str(file.metadata.get("general.architecture", "(none named)"))
    if architecture not in _SUPPORTED_GGUF_ARCHITECTURES:
        raise ModelError(
            f"model {file.path}: GGUF architecture {architecture[:100]} is not supported; "
            f"supported are {', '.join(_SUPPORTED_GGUF_ARCHITECTURES)}"
        )
    known = {f"{architecture}.{key}" for key in _HARMLESS_GGUF_KEYS}

    def get(key: str, kind: type, default: Any = None) -> Any:
        known.add(f"{architecture}.{key}")
        value = file.metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"model {file.path}: metadata {architecture}.{key} is missing")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(
                f"model {file.path}: metadata {architecture}.{key} is not of type {kind.__name__}"
            )
        return value

    if get("expert_count", int, 0) > 0:
        raise ModelError(f"model {file.path}: mixture-of-experts layers are not supported")
    if not get("attention.causal", bool, True):
        raise ModelError(f"model {file.path}: it generates no text (attention.causal is off)")

    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    if heads < 1:
        raise ModelError(f"model {file.path}: {architecture}.attention.head_count is {heads}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"model {file.path}: tensor token_embd.weight is missing")
    head_dim = get("attention.key_length", int, hidden // heads)
    if get("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"model {file.path}: values shorter than keys are not supported")
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"model {file.path}: rotating only part of each head is not supported")
    context = get("context_length", int)
    # A factor without a type, or under its old name, means linear; zero means none.
    factor = get("rope.scaling.factor", float, get("rope.scale_linear", float, 0.0))
    scaling = get("rope.scaling.type", str, "linear" if factor else "none")
    if scaling not in _SUPPORTED_GGUF_ROPE:
        raise ModelError(
            f"model {file.path}: rope scaling {scaling[:100]} is not supported; supported are "
            f"{', '.join(_SUPPORTED_GGUF_ROPE)}"
        )
    original = get("rope.scaling.original_context_length", int, 0)
    rope = RopeConfig(
        theta=get("rope.freq_base", float, 10000.0),
        kind="default" if scaling == "none" else scaling,
        factor=factor or 1.0,
        original_max_positions=original or context,
        beta_fast=get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=get("rope.scaling.yarn_beta_slow", float, 1.0),
        # Not Hugging Face's attention_factor, which is the whole: llama.cpp multiplies by it,
        # whatever the kind (yarn_attn_factor in llama-context.cpp).
        scale=get("rope.scaling.attn_factor", float, 1.0),
    )
    config = _checked(
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
            # Whichever are there are added.
            attention_bias=True,
            mlp_bias=True,
            sliding_window=None,
            rope=rope,
            dtype="float32" if embedding.kind == GGMLQuantizationType.F32 else "bfloat16",
            eos_token_ids=end_ids(file),
        ),
    )
    prefix = f"{architecture}."
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key not in known:
            raise ModelError(
                f"model {file.path}: metadata {key[:100]} ({str(value)[:50]}) is not known and may "
                "change what the model computes"
            )
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    # As in llama.cpp, a tensor too many is one that the file's maker counted on.
    for name in check_tensors(file.path, config, shapes, gguf_name):
        if name != "rope_freqs.weight":
            raise ModelError(
                f"model {file.path}: tensor {name[:100]!r} is none of a Llama model's, so the "
                "file is of another kind or damaged"
            )
    return config if original else _with_linear_context(config)


def _refuse_other_gguf_files(file: GgufFile) -> None:
    """GGUF files that are no model, or not a whole one."""
    metadata = file.metadata
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"model {file.path}: one part of a split GGUF file (split.no "
            f"{str(metadata.get('split.no'))[:20]}, counted from 0): merge the parts "
            "(llama-gguf-split --merge) and give the whole file"
        )
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    what = None
    if kind == "adapter" or "adapter.type" in metadata:
        what = "an adapter (LoRA), no model by itself: merge it into its base model"
    elif kind == "imatrix" or "imatrix.datasets" in metadata or architecture == "imatrix":
        what = "an importance matrix for quantizing, no model"
    elif kind == "mmproj" or architecture == "clip":
        what = "an image or audio encoder (mmproj), which is not supported: give the language model"
    elif architecture == "controlvector":
        what = "a control vector, no model"
    if what:
        raise ModelError(f"model {file.path}: it holds {what}")


def _checked(path: Path, config: ModelConfig) -> ModelConfig:
    """The configuration, if its numbers make sense by themselves; raises ModelError."""
    sizes = {
        name: getattr(config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_positions", "sliding_window",
        )
    }  # fmt: skip
    rope = config.rope
    rates = {"rms_norm_epsilon": config.rms_norm_epsilon} | {
        f"rope {name}": getattr(rope, name)
        for name in (
            "theta", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor",
            "beta_fast", "beta_slow", "scale", "attention_factor", "mscale", "mscale_all_dim",
        )
    }  # fmt: skip
    may_be_zero = ("rope original_max_positions", "rope mscale", "rope mscale_all_dim")
    for name, value in (sizes | rates).items():
        if value is None or (value == 0 and name in may_be_zero):
            continue
        # Written so that NaN is refused, too.
        if not 0 < value < _IMPLAUSIBLE:
            raise ModelError(f"model {path}: {name} is {str(value)[:50]}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"model {path}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"model {path}: head_dim {config.head_dim} is odd, rotation needs pairs")
    if rope.kind == "yarn" and rope.theta <= 1:
        raise ModelError(f"model {path}: rope theta is {rope.theta}, which YaRN cannot stretch")
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ModelError(
            f"model {path}: rope low_freq_factor {rope.low_freq_factor} must be less than "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    if not all(isinstance(token, int) for token in config.eos_token_ids):
        raise ModelError(f"model {path}: eos_token_id must be a token id or a list of them")
    return config


def _with_linear_context(config: ModelConfig) -> ModelConfig:
    """The configuration with the context that linear scaling stretches.

    What files give is the length before it there, while the other kinds give the length after.
    """
    if config.rope.kind != "linear":
        return config
    stretched = int(config.max_positions * config.rope.factor)
    return msgspec.structs.replace(config, max_positions=stretched)


def _rope_from_huggingface(path: Path, config: Any) -> RopeConfig:
    # As the model does once more when it is made: only then do all fields count.
    config.standardize_rope_params()
    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _SUPPORTED_ROPE:
        raise ModelError(
            f"model {path}: rope scaling {str(kind)[:100]} is not supported; supported are "
            f"{', '.join(_SUPPORTED_ROPE)}"
        )
    positions = config.max_position_embeddings
    original = parameters.get("original_max_position_embeddings") or positions

    def number(name: str, default: float | None = None) -> Any:
        value = parameters.get(name)
        value = default if value is None else value
        if value is None and name != "attention_factor" and "mscale" not in name:
            raise ModelError(f"model {path}: rope scaling {kind} needs {name}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ModelError(f"model {path}: rope parameter {name} is {str(value)[:50]!r}")
        return value

    theta = number("rope_theta")
    match kind:
        case "linear":
            return RopeConfig(theta=theta, kind=kind, factor=number("factor"))
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=number("factor"),
                original_max_positions=original,
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
            )
        case "yarn":
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=number("factor", positions / original),
                original_max_positions=original,
                beta_fast=number("beta_fast", 32.0) or 32.0,
                beta_slow=number("beta_slow", 1.0) or 1.0,
                truncate=bool(parameters.get("truncate", True)),
                attention_factor=number("attention_factor"),
                mscale=number("mscale"),
                mscale_all_dim=number("mscale_all_dim"),
            )
    # What is dynamic begins beyond max_position_embeddings.
    return RopeConfig(theta=theta)


def _eos_ids(path: Path, from_config: int | list[int] | None) -> tuple[int, ...]:
    """All end-of-text tokens, those of config.json and those of generation_config.json; the
    tokenizer may have more."""
    generation = generation_config(path).get("eos_token_id")
    found = token_ids(path / "config.json", "eos_token_id", from_config) | token_ids(
        path / "generation_config.json", "eos_token_id", generation
    )
    return tuple(sorted(found))
