"""What is read of a model before anything is decided: its files, its sizes, its tokenizer."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headrace.checkpoint.generation_config import (
    SamplingDefaults,
    in_words,
    sampling_defaults_of_directory,
    sampling_defaults_of_gguf,
)
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.checkpoint.synthetic import (
    parse_stage_time,
    synthetic_tokenizer,
)
from headrace.checkpoint.tokenizer import (
    Tokenizer,
    tokenizer_from_huggingface,
    tokenizer_of_gguf,
)
from headrace.config import EngineConfig
from headrace.errors import ModelError
from headrace.model.read import model_from_gguf, model_from_huggingface
from headrace.model.synthetic import synthetic_model
from headrace.protocol.messages import SyntheticTime
from headrace.protocol.model_config import ModelSizes, StageShare
from headrace.protocol.program import Program

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as its files describe it. sampling_defaults: what its makers recommend, for requests
    that say nothing. program: builds what a stage of a share runs. synthetic: the time that its
    stages take, if they run no model. read_tokenizer: takes a second or more, so it is called while
    the stages load."""

    files: ModelFiles
    sizes: ModelSizes
    program: Callable[[StageShare], Program]
    sampling_defaults: SamplingDefaults
    synthetic: SyntheticTime | None
    read_tokenizer: Callable[[], Tokenizer]

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError if it cannot be read or is another model's."""
        tokenizer = self.read_tokenizer()
        # Added tokens may lie beyond the weights: the engine refuses those when they are used.
        size = tokenizer.core.get_vocab_size(with_added_tokens=False)
        if size > self.sizes.vocab_size:
            raise ModelError(
                f"model {self.files.path}: its tokenizer has {size} tokens, its weights "
                f"{self.sizes.vocab_size}: the tokenizer belongs to another model"
            )
        return tokenizer

    def end_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Tokens that end a text, by the model's files or by its tokenizer.

        Files write -1, or an id beyond the vocabulary, for a token that they do not have: it could
        never come.
        """
        ends = {*self.sizes.eos_token_ids, *tokenizer.end_ids}
        return frozenset(token for token in ends if 0 <= token < self.sizes.vocab_size)


def read_model(config: EngineConfig) -> Model:
    """The model that the config names, its tokenizer apart.

    Raises ModelError for what is missing, broken or not supported, UsageError for a synthetic
    model's time that is none.
    """
    files = locate_model(config.model)
    path = files.path
    synthetic = None
    read_defaults: Callable[[], SamplingDefaults] = dict
    read_tokenizer: Callable[[], Tokenizer] = synthetic_tokenizer
    match files.kind:
        case "synthetic":
            blueprint = synthetic_model(config.pipeline_parallel_size)
            synthetic = parse_stage_time(str(path))
        case "gguf":
            file = read_gguf(path)
            blueprint = model_from_gguf(file)
            read_defaults = partial(sampling_defaults_of_gguf, file)
            read_tokenizer = partial(tokenizer_of_gguf, file)
        case "huggingface":
            blueprint = model_from_huggingface(path)
            read_defaults = partial(sampling_defaults_of_directory, path)
            read_tokenizer = partial(tokenizer_from_huggingface, path)
    defaults = read_defaults() if config.generation_config == "auto" else {}
    if defaults:
        _log.info(
            "sampling defaults of the model, for what requests leave out: %s (generation_config; "
            "--generation-config none: without)",
            in_words(defaults),
        )
    return Model(
        files=files,
        sizes=blueprint.sizes,
        program=blueprint.program,
        sampling_defaults=defaults,
        synthetic=synthetic,
        read_tokenizer=read_tokenizer,
    )
