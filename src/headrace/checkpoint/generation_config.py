"""What a model's makers recommend for choosing tokens: defaults of sampling parameters, by
SamplingParams' names, and end-of-text tokens.

Sources: generation_config.json, of which vLLM takes these fields (`get_diff_sampling_param` in
vllm/config/model.py; `do_sample` is not among them); `general.sampling.*` of a GGUF file, as
llama.cpp's converter writes it (gguf-py/gguf/constants.py).
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.json_file import read_json_object
from headrace.checks import shortened
from headrace.errors import ModelError, UsageError
from headrace.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

# Numbers that SamplingParams takes, by its names.
SamplingDefaults = Mapping[str, Any]

_FILE = "generation_config.json"
_JSON_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_PREFIX = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Decimals that a float32 is sure to have kept.
_FLOAT32_DECIMALS = 6


def generation_config(path: Path) -> dict[str, Any]:
    """The directory's generation_config.json, empty if there is none; ModelError if it is no
    JSON object."""
    file = path / _FILE
    return read_json_object(file) if file.is_file() else {}


def sampling_defaults_of_directory(path: Path) -> SamplingDefaults:
    """Those of generation_config.json; one out of its range is told and left out."""
    raw = generation_config(path)
    found = {ours: raw[name] for name, ours in _JSON_NAMES.items() if raw.get(name) is not None}
    return _valid(found, f"{path / _FILE}")


def sampling_defaults_of_gguf(file: GgufFile) -> SamplingDefaults:
    """Those of general.sampling.*; what is out of its range, and other ways of choosing (mirostat,
    xtc, the order of the filters), are told and left out."""
    found: dict[str, Any] = {}
    for key, value in file.metadata.items():
        if not key.startswith(_GGUF_PREFIX):
            continue
        name = _GGUF_NAMES.get(key.removeprefix(_GGUF_PREFIX))
        if name is None:
            _log.warning("%s: %s is ignored: there is no such parameter here", file.path, key)
        else:
            found[name] = round(value, _FLOAT32_DECIMALS) if isinstance(value, float) else value
    return _valid(found, f"{file.path}")


def token_ids(file: Path, name: str, value: Any) -> set[int]:
    """A field that is one token id, several, or none. Raises ModelError for anything else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ModelError(f"{file}: {name} must be a token id or a list of them, not {value!r:.100}")
    return set(ids)


def in_words(defaults: SamplingDefaults) -> str:
    """One line of them."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())


def _valid(found: dict[str, Any], source: str) -> SamplingDefaults:
    valid = {}
    for name, value in found.items():
        try:
            SamplingParams(**{name: value})
        except UsageError as error:
            _log.warning("%s: its %s (%s) is ignored: %s", source, name, shortened(value), error)
        else:
            valid[name] = value
    return valid
