"""Flags made of what settings declare: a command says only which settings it has."""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, get_origin

import typer

from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.setting import Declared, declared_settings


@dataclass(frozen=True)
class Flags:
    """Stands in a command's signature for the flags of settings, with their defaults there."""

    defaults: dict[Declared, Any]


def engine_flags(*names: str, **defaults: Any) -> Flags:
    """Flags of these settings of the engine, and of those with defaults of the command's own."""
    return _flags(EngineConfig, {*names, *defaults}, defaults)


def all_flags(settings: type, without: tuple[str, ...] = ()) -> Flags:
    """Flags of all settings that the dataclass declares, but for some."""
    return _flags(settings, declared_settings(settings).keys() - set(without), {})


def with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """The command with flags where its signature has Annotated[dict[str, Any], Flags].

    It is called with a dict of the settings' values by name instead, each checked. Flags are in the
    order in which the settings are declared, but that of the model comes first of all.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, list[Declared]] = {}
    for parameter in inspect.signature(command).parameters.values():
        flags = _flags_of(parameter)
        if flags is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = list(flags.defaults)
        parameters += [_parameter(each, default) for each, default in flags.defaults.items()]
    parameters.sort(key=lambda parameter: parameter.name != "model")

    @functools.wraps(command)
    def run(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = {each.name: _read(each, values.pop(each.name)) for each in group}
        return command(**values)

    # What typer looks at.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags(settings: type, names: set[str], defaults: dict[str, Any]) -> Flags:
    return Flags(
        {
            declared: defaults.get(name, declared.default)
            for name, declared in declared_settings(settings).items()
            if name in names
        }
    )


def _flags_of(parameter: inspect.Parameter) -> Flags | None:
    notes = getattr(parameter.annotation, "__metadata__", ())
    return next((note for note in notes if isinstance(note, Flags)), None)


def _parameter(declared: Declared, default: Any) -> inspect.Parameter:
    """The setting as typer takes it."""
    setting, kind, names = declared.setting, declared.kind, [declared.flag]
    if setting.short is not None:
        names.append(setting.short)
    if setting.none is not None:
        kind, default = str, setting.none if default is None else str(default)
    elif setting.json_list:
        kind, default = str, json.dumps(list(default))
    elif get_origin(kind) is tuple:
        # Given once for each text.
        kind, default = list[str] | None, None
    elif setting.size or get_origin(kind) is Literal:
        kind = str if default is not None else str | None
    elif kind is bool and default:
        names = [f"{declared.flag}/--no-{declared.flag.removeprefix('--')}"]
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, typer.Option(*names, help=setting.help)],
    )


def _read(declared: Declared, given: Any) -> Any:
    """The setting's value of its flag's. Raises UsageError, naming the flag if it can."""
    setting, value = declared.setting, given
    if setting.none is not None:
        value = None if given == setting.none else _number(declared.flag, given, setting.none)
    elif setting.json_list:
        value = _list(declared.flag, given)
    elif get_origin(declared.kind) is tuple:
        value = tuple(given or ())
    declared.check(value)
    return value


def _number(flag: str, text: str, none: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} must be {none} or a number, not {text!r}") from None


def _list(flag: str, text: str) -> tuple[str, ...]:
    """The texts of a JSON list, as vLLM's CORS flags take them."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"""{flag} must be a JSON list of texts such as '["*"]', not {text!r}""")
    return tuple(value)
