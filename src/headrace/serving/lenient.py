"""Numbers and truth values written in another way, taken as vLLM takes them: 16.0 or "16" for 16.

vLLM's bodies are pydantic models in lax mode. This takes the same, but for what may be meant
otherwise: truth values for numbers (`logprobs: true` is a chat's, and asks completions for one
token's), and numbers that are none ("nan").
Source: https://docs.pydantic.dev/latest/concepts/conversion_table/
"""

import math
import re
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

_INTEGER = re.compile(r"\s*([+-]?\d{1,20})(?:\.0*)?\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_LONGEST_NUMBER = 100
_LONGEST_LIST = 2000
_TRUE = frozenset({"1", "t", "true", "y", "yes", "on"})
_FALSE = frozenset({"0", "f", "false", "n", "no", "off"})


def lenient(value: Any, kind: type[msgspec.Struct]) -> Any:
    """JSON's values as the fields of a struct want them; what does not fit stays as it is."""
    return _read(value, _type_of(kind))


@cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _read(value: Any, kind: inspect.Type) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    kinds = tuple(_bare(one) for one in kinds)
    if isinstance(value, str | int | float):
        return _read_one(value, kinds)
    for one in kinds:
        if isinstance(value, dict) and isinstance(one, inspect.StructType):
            for field in one.fields:
                if field.encode_name in value:
                    value[field.encode_name] = _read(value[field.encode_name], field.type)
        elif isinstance(value, dict) and isinstance(one, inspect.DictType):
            if len(value) <= _LONGEST_LIST:
                of_value = one.value_type
                return {key: _read(item, of_value) for key, item in value.items()}
        elif isinstance(value, list) and isinstance(one, inspect.ListType):
            # Prompts and messages, which may be long, are not looked through.
            of_item = _bare(one.item_type)
            if isinstance(of_item, inspect.IntType) and len(value) <= _LONGEST_LIST:
                return [_read(item, of_item) for item in value]
    return value


def _bare(kind: inspect.Type) -> inspect.Type:
    """Without what the OpenAPI document says of it."""
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _read_one(value: str | float, kinds: tuple[inspect.Type, ...]) -> str | float:
    wanted = {type(kind) for kind in kinds}
    if wanted & {inspect.AnyType, inspect.StrType} and isinstance(value, str):
        return value
    if inspect.BoolType in wanted:
        word = value.strip().lower() if isinstance(value, str) and len(value) < 10 else value
        if word in _TRUE or (word == 1 and inspect.IntType not in wanted):
            return True
        if word in _FALSE or (word == 0 and inspect.IntType not in wanted):
            return False
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
        if inspect.IntType in wanted and (found := _INTEGER.fullmatch(value)):
            return int(found[1])
        if inspect.FloatType in wanted and _NUMBER.fullmatch(value):
            number = float(value)
            return number if math.isfinite(number) else value
    if isinstance(value, float) and inspect.IntType in wanted and value.is_integer():
        return int(value)
    return value
