"""What an architecture's file tells the rest: its names, how to read it, and its program."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.huggingface_config import HuggingFaceConfig
from headrace.model.decoder import Decoder
from headrace.protocol.model_config import ModelSizes, StageShare
from headrace.protocol.program import Program


@dataclass(frozen=True)
class Design:
    """A model as its configuration describes it, before it is held against its tensors.

    program: builds a stage's share, in time and memory that the share bounds.
    """

    decoder: Decoder
    program: Callable[[StageShare], Program]


@dataclass(frozen=True)
class Blueprint:
    """What everybody else knows of a model: numbers, and what builds a stage's program."""

    sizes: ModelSizes
    program: Callable[[StageShare], Program]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models.

    name: of its class in transformers, as config.json's "architectures" has it, and for people.
    base_name: of the class that has the same tensors without an output projection. model_type:
    config.json's. config_class: of transformers, which reads config.json. fields: of config.json
    that make the model. ignored_fields: that have no meaning for it, though for other families.
    from_huggingface: raises ModelError for values that are not supported. mxfp4: whether weights of
    a directory may be in MXFP4. models: some that people know. refused: for people, what of the
    family raises ModelError, besides what does for all (headrace.cli.models).

    gguf: its general.architecture in GGUF files, None if those are another family's.
    ignored_gguf_keys: metadata that have no meaning for it. from_gguf: asks for all that have one.
    """

    name: str
    models: tuple[str, ...]
    refused: tuple[str, ...]
    base_name: str
    model_type: str
    config_class: str
    fields: frozenset[str]
    from_huggingface: Callable[[HuggingFaceConfig], Design]
    ignored_fields: frozenset[str] = frozenset()
    mxfp4: bool = False
    gguf: str | None = None
    ignored_gguf_keys: frozenset[str] = frozenset()
    from_gguf: Callable[[GgufMetadata], Design] | None = None
