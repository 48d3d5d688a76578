"""Text to tokens and back, for either kind of model files, and which chat template they have."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import tokenizers

from headrace.checkpoint.chat_template import ChatTemplate
from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.gguf_tokenizer import template_tokens, tokenizer_from_gguf
from headrace.errors import ModelError, UsageError

# Characters of a text that takes some milliseconds.
_LONG_TEXT = 2000


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer. chat_template: None if it has none, no_template then says why. end_ids:
    end-of-text tokens that the tokenizer's own files name."""

    core: tokenizers.Tokenizer
    chat_template: ChatTemplate | None = None
    no_template: str = "the model has no chat template: give it a plain prompt"
    end_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, with the model's own start token if it has one.

        Raises UsageError if the text is not valid Unicode.
        """
        if len(text) < _LONG_TEXT:
            return list(self.core.encode(_checked(text), add_special_tokens=add_special_tokens).ids)
        # As a batch, since encode() stops all other threads meanwhile.
        batch = self.core.encode_batch_fast([_checked(text)], add_special_tokens=add_special_tokens)
        return list(batch[0].ids)

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Where each token that `encode` gives begins, in characters of the text: parts of one
        character where that does, and what is no part of the text, such as the start token, where
        the token before it ended."""
        batch = self.core.encode_batch([_checked(text)], add_special_tokens=add_special_tokens)
        starts, last = [], 0
        for start, end in batch[0].offsets:
            starts.append(start if end > start else last)
            last = max(last, end)
        return starts

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has more than that for each of its tokens."""
        return max(map(len, self.core.get_vocab()), default=1)

    def decode(self, ids: list[int]) -> str:
        """Text of the tokens, without special ones."""
        text: str = self.core.decode(ids, skip_special_tokens=True)
        return text


def _count_spaces(core: tokenizers.Tokenizer) -> None:
    """Have offsets count a token's first space, which byte-level tokenizers may leave out."""
    processor = core.post_processor
    if processor is not None:
        trims, counts = b'"trim_offsets":true', b'"trim_offsets":false'
        processor.__setstate__(processor.__getstate__().replace(trims, counts))
        core.post_processor = processor


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid Unicode text: {error.reason}") from None
    return text


def tokenizer_from_huggingface(path: Path) -> Tokenizer:
    """The directory's tokenizer through transformers; ModelError if its files are wrong."""
    # Slow to import, and only this kind of model needs it.
    from transformers import AutoTokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Said, not left out: transformers would ask on the terminal and run the answer "y".
            loaded = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
            core = loaded.backend_tokenizer
            # A tokenizer.json may carry settings for training, which would cut prompts silently.
            core.no_truncation()
            core.no_padding()
            _count_spaces(core)
    except Exception as error:
        if not (path / "tokenizer.json").is_file():
            raise ModelError(
                f"model {path}: its tokenizer cannot be loaded: there is no tokenizer.json"
            ) from error
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs Python code of the directory's own (auto_map), which is never run"
        raise ModelError(
            f"model {path}: its tokenizer cannot be loaded: "
            f"{reason if len(reason) < 200 else reason[:200] + '...'}"
        ) from error
    named = loaded.chat_template or {}
    templates = {"default": named} if isinstance(named, str) else dict(named)
    tokenizer = _with_template(core, templates, loaded.special_tokens_map)
    end = loaded.eos_token_id
    return tokenizer if end is None else replace(tokenizer, end_ids=(int(end),))


def tokenizer_of_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer and chat template inside a GGUF file; ModelError if it is not supported."""
    core = tokenizer_from_gguf(file)
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(f"{key}.") if name != key else "default": value
        for name, value in file.metadata.items()
        if name == key or name.startswith(f"{key}.")
    }
    return _with_template(core, templates, template_tokens(file, core))


def _with_template(
    core: tokenizers.Tokenizer, templates: Mapping[str, object], tokens: Mapping[str, str]
) -> Tokenizer:
    """templates: by name. Chats get the default one, as with transformers, which takes others only
    for requests that offer tools or name them."""
    source = templates.get("default")
    if isinstance(source, str) and source:
        return Tokenizer(core, ChatTemplate(source, tokens))
    if others := sorted(templates.keys() - {"default"}):
        return Tokenizer(
            core,
            no_template=f"the model has chat templates named {', '.join(others)}, but no default "
            "one: give it a plain prompt",
        )
    return Tokenizer(core)
