"""Checks of what users set, and errors that say what was wrong in their own words."""

import difflib
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from headrace.errors import UsageError

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    type(None): "None",
}


def check_type(name: str, value: object, kind: Any) -> None:
    """Raises UsageError naming the setting if its value is not of the annotated type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise UsageError(f"{name} must be {_in_words(kind)}, not {shortened(value)}") from None


def unknown_name(user: str, thing: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a setting that `user` does not have; thing: what it calls them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(names)}"
    return UsageError(f"{user} has no {thing} {name}: {hint}")


def shortened(value: object) -> str:
    """A value as Python writes it, cut where it would drown the message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _in_words(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    # A tuple of any length is written tuple[str, ...].
    origin, arguments = get_origin(kind), [a for a in get_args(kind) if a is not ...]
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(argument) for argument in arguments)
    parts = [_in_words(argument).removeprefix("a ") for argument in arguments]
    if len(parts) == 2:
        return f"a dict from {parts[0]} to {parts[1]}"
    return f"a list of {parts[0]}s"
