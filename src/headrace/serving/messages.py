"""From the messages of a chat to what chat templates take."""

import json
from typing import Any

from headrace.checkpoint.tokenizer import Message
from headrace.serving.errors import ApiError
from headrace.serving.requests import (
    AssistantMessage,
    ChatMessage,
    Content,
    DeveloperMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

_ROLES = {
    SystemMessage: "system",
    DeveloperMessage: "system",
    UserMessage: "user",
    AssistantMessage: "assistant",
    ToolMessage: "tool",
}


def template_messages(messages: list[ChatMessage], knows_tool_calls: bool) -> list[Message]:
    """Each message as templates know it; parts of a content are joined by newlines, as in vLLM.

    knows_tool_calls: whether the template shows calls of tools. Raises ApiError if it does not and
    there are some, for an answer without content, and for calls whose arguments are no JSON object.
    """
    for number, message in enumerate(messages):
        if isinstance(message, AssistantMessage) and message.tool_calls and not knows_tool_calls:
            where = f"messages[{number}].tool_calls"
            raise ApiError(
                400, f"{where}: the model's chat template has no calls of tools", param=where
            )
    return [_template_message(number, message) for number, message in enumerate(messages)]


def _template_message(number: int, message: ChatMessage) -> Message:
    found: Message = {"role": _ROLES[type(message)], "content": _text(message.content)}
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            found["tool_calls"] = [
                _tool_call(f"messages[{number}].tool_calls[{place}]", call)
                for place, call in enumerate(message.tool_calls)
            ]
        elif message.content is None:
            where = f"messages[{number}].content"
            raise ApiError(400, f"{where} is missing", param=where)
    return found


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _tool_call(where: str, call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            400, f"{where}.function.arguments must be a JSON object as a text",
            param=f"{where}.function.arguments",
        )  # fmt: skip
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
