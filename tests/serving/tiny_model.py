"""The model that the tests of the API serve, and how to ask for it."""

import inspect
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.resources import Completions
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tiny_checkpoints import write_tiny_gguf

MODEL = "tiny"
OTHER_NAME = "tests/tiny"
# Long enough for an answer that nobody waits for the end of.
MAX_LENGTH = 20_000
MAX_SEQUENCES = 16
MAX_QUEUED = 24
END_TOKEN = 299

# Shows all that messages may have; `mood` is an option of its own.
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('this template is shy') }}{% endif %}"
    "<{{ m.role }}{{ ' ' ~ m.name if m.name }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}]"
    "{% endfor %}{{ ' for ' ~ m.tool_call_id if m.tool_call_id }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant{{ ' ' ~ mood if mood }}>{% endif %}"
)


def write_chat_model(path: Path) -> Path:
    """A byte-level model of random weights with a chat template."""
    return write_tiny_gguf(path, MAX_LENGTH, chat_template=_TEMPLATE)


def completion_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """A request's fields as the official client's completions.create takes them."""
    return _arguments(Completions.create, params)


def chat_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """A request's fields as the official client's chat.completions.create takes them."""
    return _arguments(ChatCompletions.create, params)


def complete(client: OpenAI, prompt: Any, params: dict[str, Any]) -> Completion:
    """A completion that is not streamed."""
    answer = client.completions.create(**completion_arguments({"prompt": prompt, **params}))
    assert isinstance(answer, Completion)
    return answer


def chat(client: OpenAI, messages: Any, **params: Any) -> ChatCompletion:
    """An answer that is not streamed."""
    answer = client.chat.completions.create(**chat_arguments({"messages": messages, **params}))
    assert isinstance(answer, ChatCompletion)
    return answer


def _arguments(create: Any, params: dict[str, Any]) -> dict[str, Any]:
    """vLLM's extras are no arguments: they go into extra_body."""
    known = inspect.signature(create).parameters
    own = {name: value for name, value in params.items() if name in known}
    extra = {name: value for name, value in params.items() if name not in known}
    return {"model": MODEL, **own, "extra_body": extra}
