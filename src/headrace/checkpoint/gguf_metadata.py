"""What a GGUF file's metadata say of its model: typed, and none left over that nobody read.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_file import GgufFile
from headrace.errors import ModelError

# Metadata under the architecture's name that llama.cpp reads for such a model, besides those read
# here, or that change nothing (llama-model.cpp and llama-hparams.h there).
_HARMLESS_KEYS = frozenset(
    {
        "vocab_size", "expert_used_count", "tensor_data_layout", "rope.scaling.finetuned",
        "attention.layer_norm_epsilon",
    }
)  # fmt: skip


@dataclass
class GgufMetadata:
    """A file's metadata under its architecture's name, which remembers the keys it was asked for.

    ignored: keys that mean nothing to this architecture.
    """

    file: GgufFile
    architecture: str
    ignored: frozenset[str] = frozenset()
    _known: set[str] = field(default_factory=set, init=False)

    @property
    def path(self) -> Path:
        """The file's."""
        return self.file.path

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `architecture.key`; ModelError if it is missing without a default, or not
        of this type."""
        self._known.add(key)
        name = f"{self.architecture}.{key}"
        value = self.file.metadata.get(name, default)
        if value is None:
            raise ModelError(f"model {self.path}: metadata {name} is missing")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(f"model {self.path}: metadata {name} is not of type {kind.__name__}")
        return value

    def refuse_unread(self) -> None:
        """Raises ModelError for metadata of the architecture that nobody asked for."""
        prefix = f"{self.architecture}."
        known = {prefix + key for key in self._known | _HARMLESS_KEYS | self.ignored}
        for key, value in self.file.metadata.items():
            if key.startswith(prefix) and key not in known:
                raise ModelError(
                    f"model {self.path}: metadata {key[:100]} ({str(value)[:50]}) is not known and "
                    "may change what the model computes"
                )


def refuse_other_gguf_files(file: GgufFile) -> None:
    """Raises ModelError for GGUF files that are no model, or not a whole one."""
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
