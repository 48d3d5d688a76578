"""Text to tokens and back, and chats to prompts, for either kind of model files."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import tokenizers

from headrace.checkpoint.gguf_file import GgufFile
from headrace.checkpoint.gguf_tokenizer import special_ids, tokenizer_from_gguf
from headrace.errors import ModelError, UsageError

if TYPE_CHECKING:
    import jinja2

# As chat templates take it: role, content, and what else a template may know.
Message = dict[str, Any]
# What a template is given, by name, besides what render_chat sets itself.
TemplateOptions = Mapping[str, Any]
# Names that are not the caller's: parts of the chat itself, and arguments of transformers'
# apply_chat_template that are no template variables.
_RESERVED = frozenset(
    {
        "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "processor_kwargs",
    }
)  # fmt: skip

# Characters of a text that takes some milliseconds.
_LONG_TEXT = 2000


class RenderChat(Protocol):
    """Turns messages into the prompt text of the next answer.

    add_generation_prompt: end with the beginning of the answer. options: variables of the template.
    """

    def __call__(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        options: TemplateOptions = MappingProxyType({}),
    ) -> str: ...


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer. template: renders chats; raises UsageError where it refuses them.
    template_text: its source, if there is one."""

    core: tokenizers.Tokenizer
    template: RenderChat
    template_text: str = ""

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

    @property
    def knows_tool_calls(self) -> bool:
        """Whether the chat template shows an answer's calls of tools, or would leave them out."""
        return "tool_calls" in self.template_text

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Token ids of a chat; the template brings its own special tokens.

        Raises UsageError if the model has no chat template or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        options: TemplateOptions = MappingProxyType({}),
    ) -> str:
        """The prompt text of a chat. Raises UsageError as encode_chat, and for an option whose
        name is not a template's to have."""
        for name in options:
            if name in _RESERVED:
                raise UsageError(f"chat_template_kwargs must not have {name}: it is set otherwise")
        return self.template(messages, add_generation_prompt, options)

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
        raise ModelError(
            f"model {path}: its tokenizer cannot be loaded: "
            f"{reason if len(reason) < 200 else reason[:200] + '...'}"
        ) from error

    def render(
        messages: list[Message],
        add_generation_prompt: bool = True,
        options: TemplateOptions = MappingProxyType({}),
    ) -> str:
        if not loaded.chat_template:
            _no_template()
        # Whatever else is an argument there would not reach the template.
        arguments = inspect.signature(loaded.apply_chat_template).parameters
        if taken := sorted(options.keys() & arguments.keys()):
            raise UsageError(f"chat_template_kwargs must not have {taken[0]}: it is set otherwise")
        try:
            text = loaded.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except Exception as error:
            raise UsageError(f"the chat template refuses the messages: {error}") from error
        return str(text)

    return Tokenizer(core, render, str(loaded.chat_template or ""))


def tokenizer_of_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer and chat template inside a GGUF file; ModelError if it is not supported."""
    core = tokenizer_from_gguf(file)
    template = file.metadata.get("tokenizer.chat_template")
    specials = {
        f"{name}_token": core.id_to_token(token) or "" for name, token in special_ids(file).items()
    }

    def render(
        messages: list[Message],
        add_generation_prompt: bool = True,
        options: TemplateOptions = MappingProxyType({}),
    ) -> str:
        if not isinstance(template, str):
            _no_template()
        compiled = _compile_template(template)
        context = {
            **specials,
            **options,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return compiled.render(context)
        except Exception as error:
            # Templates are little programs: whatever goes wrong inside is theirs.
            raise UsageError(f"the chat template refuses the messages: {error}") from error

    return Tokenizer(core, render, template if isinstance(template, str) else "")


@lru_cache(maxsize=8)
def _compile_template(template: str) -> "jinja2.Template":
    """A chat template with the names and settings that transformers promises templates.

    Source: https://huggingface.co/docs/transformers/chat_templating_writing
    """
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise ModelError(f"the model's chat template is no valid template: {error}") from error


def _no_template() -> NoReturn:
    raise UsageError("the model has no chat template: give it a plain prompt")
