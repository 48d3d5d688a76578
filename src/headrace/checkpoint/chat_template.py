"""Chat templates: programs in a model's files that turn a conversation into a prompt.

They are written for transformers, so they run in its environment (its filters, tags and names),
whatever kind of file they come from. They are also programs of strangers: each rendering has so
many seconds and characters, and no more.
Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import ctypes
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headrace.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment

# As chat templates take it: role, content, and what else a template may know.
Message = dict[str, Any]
# What a template is given, by name, besides the chat itself.
TemplateOptions = Mapping[str, Any]

# Seconds that a rendering may take; the longest conversations take a fraction of one.
TIME_LIMIT = 10.0
# Operators by which a short template makes something large in one step: Python carries each out
# without a pause in which it could be stopped.
_BOUNDED_OPERATORS = ("*", "**")
_LARGEST_POWER_BITS = 4096


class TooMuchTextError(UsageError):
    """The template makes more text than could be a prompt."""


@dataclass(frozen=True)
class ChatTemplate:
    """source: the template's text. tokens: bos_token and so on, by transformers' names."""

    source: str
    tokens: Mapping[str, str]

    @property
    def words(self) -> frozenset[str]:
        """The names and texts in the template's code: what it may ask messages for.

        Raises UsageError if the template is none.
        """
        return _words(self.source)

    def render(
        self,
        messages: list[Message],
        most_characters: int,
        add_generation_prompt: bool = True,
        options: TemplateOptions = MappingProxyType({}),
    ) -> str:
        """The prompt of the next answer to messages of plain JSON values; blocks, for TIME_LIMIT at
        most. add_generation_prompt: end with the beginning of the answer. options: variables.

        Raises UsageError if the template refuses the messages, takes too long or is none, and
        TooMuchTextError beyond most_characters.
        """
        # Before the clock runs, since it takes a second.
        _import_transformers()
        variables = {
            "tools": None,
            "documents": None,
            **self.tokens,
            **options,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }

        def work() -> str:
            template = _compiled(self.source, most_characters)
            try:
                return template.render(variables)
            except UsageError:
                raise
            except Exception as error:
                # Whatever goes wrong inside is the template's.
                reason = " ".join(str(error).split()) or type(error).__name__
                raise UsageError(f"the chat template refuses the messages: {reason}") from error

        return _within(TIME_LIMIT, work)


def _import_transformers() -> None:
    # Slow, and only chats need it.
    import transformers.utils.chat_template_utils  # noqa: F401


def _environment() -> "SandboxedEnvironment":
    """A new one of transformers', which makes one for each template that it compiles."""
    from jinja2.sandbox import SandboxedEnvironment
    from transformers.utils import chat_template_utils

    environment = chat_template_utils._cached_compile_jinja_template("").environment
    assert isinstance(environment, SandboxedEnvironment)
    return environment


@lru_cache(maxsize=8)
def _compiled(source: str, most_characters: int) -> "Template":
    environment = _environment()

    def concat(parts: Iterable[str]) -> str:
        taken, length = [], 0
        for part in parts:
            length += len(part)
            if length > most_characters:
                raise TooMuchTextError(
                    f"the chat template makes more than {most_characters} characters of them"
                )
            taken.append(part)
        return "".join(taken)

    def times(left: Any, right: Any) -> Any:
        for many, count in ((left, right), (right, left)):
            is_repeated = isinstance(many, str | list | tuple) and isinstance(count, int)
            if is_repeated and len(many) * count > most_characters:
                raise TooMuchTextError("the chat template repeats a text too often")
        return operator.mul(left, right)

    def power(left: Any, right: Any) -> Any:
        are_whole = isinstance(left, int) and isinstance(right, int)
        if are_whole and left.bit_length() * right > _LARGEST_POWER_BITS:
            raise OverflowError("a number is too large")
        return operator.pow(left, right)

    # The environment's own joins text: the template's, and a macro's or block's.
    environment.concat = concat  # type: ignore[method-assign]
    environment.intercepted_binops = frozenset(_BOUNDED_OPERATORS)
    environment.binop_table |= {"*": times, "**": power}
    try:
        return environment.from_string(source)
    except UsageError:
        raise
    except Exception as error:
        raise _no_template(error) from error


@lru_cache(maxsize=8)
def _words(source: str) -> frozenset[str]:
    _import_transformers()
    try:
        tokens = list(_environment().lex(source))
    except Exception as error:
        raise _no_template(error) from error
    texts = {text[1:-1] for _, kind, text in tokens if kind == "string"}
    return frozenset(texts | {text for _, kind, text in tokens if kind == "name"})


def _no_template(error: Exception) -> UsageError:
    return UsageError(f"the model's chat template is no valid template: {error}")


class _Stop(SystemExit):
    """Raised in a thread that is to end. Of a kind that threads end by without a word."""


def _within(seconds: float, work: Callable[[], str]) -> str:
    """What work gives, in a thread that is told to stop if it takes longer. Raises UsageError then.

    The exception reaches the thread between two steps of Python code, of which templates are made.
    """
    outcome: Future[str] = Future()

    def run() -> None:
        with suppress(_Stop):
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)

    thread = threading.Thread(target=run, name="headrace-chat-template", daemon=True)
    thread.start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        raise UsageError(
            f"messages: the chat template had not rendered them after {seconds:g} s"
        ) from None
    finally:
        # Also if an interrupt ended the wait.
        if not outcome.done():
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
            )
