"""How a setting is declared: once, with its help and its range, for Python and the command line."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, Field, dataclass, fields
from typing import Any, get_type_hints

from headrace.checks import check_type
from headrace.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True)
class Setting:
    """What a field declares of itself: `name: Annotated[type, Setting(...)] = default`.

    help: what it sets, as `--help` shows it. flag: its flag, where that is not the field's name
    with dashes. short: a second flag, such as -pp. least, above, most: its range; above is not part
    of it, the two others are. none: how a flag writes None. size: bytes, or a text such as 2GiB.
    json_list: a flag takes all of its texts at once, as a JSON list; without it, one at a time.
    """

    help: str
    _: KW_ONLY
    flag: str | None = None
    short: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    none: str | None = None
    size: bool = False
    json_list: bool = False


@dataclass(frozen=True)
class Declared:
    """A setting with what its field says. default: dataclasses.MISSING if there is none."""

    name: str
    kind: Any
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return self.setting.flag or "--" + self.name.replace("_", "-")

    @property
    def range(self) -> str | None:
        """The range in words; None if any value will do."""
        least, above, most = self.setting.least, self.setting.above, self.setting.most
        if above is not None:
            return f"above {above}" if most is None else f"above {above} and at most {most}"
        if least is not None:
            return f"at least {least}" if most is None else f"from {least} to {most}"
        return None

    def check(self, value: Any) -> None:
        """Raises UsageError for a value of another type, naming the setting, and for one out of
        range, naming the flag."""
        check_type(self.name, value, self.kind)
        if value is None:
            return
        if self.setting.size:
            self._check_size(value)
        elif self.range is not None and not self._holds(value):
            raise UsageError(f"{self.flag} must be {self.range}, not {value}")

    def _holds(self, value: float) -> bool:
        """Whether the value is in the range. Infinity is in none."""
        least, above, most = self.setting.least, self.setting.above, self.setting.most
        return (
            math.isfinite(value)
            and (least is None or least <= value)
            and (above is None or above < value)
            and (most is None or value <= most)
        )

    def _check_size(self, value: int | str) -> None:
        try:
            size = size_in_bytes(value)
        except ValueError:
            raise UsageError(f"{self.flag} {value!r} is not a size such as 2GiB or 500MB") from None
        if size < 1:
            raise UsageError(f"{self.flag} must be at least 1 byte")


@functools.cache
def declared_settings(settings: type) -> Mapping[str, Declared]:
    """The fields of a dataclass that are declared as settings, by name, in its order."""
    hints = get_type_hints(settings, include_extras=True)
    found = (_declared(field, hints[field.name]) for field in fields(settings))
    return {declared.name: declared for declared in found if declared is not None}


def check_settings(settings: object) -> None:
    """Raises UsageError for the first declared setting with a wrong type or out of its range."""
    kind: type = type(settings)
    for name, declared in declared_settings(kind).items():
        declared.check(getattr(settings, name))


def size_in_bytes(size: int | str) -> int:
    """Bytes of a size such as 2GiB, 500MB or 1000000. Raises ValueError if it is none."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", size.strip().lower())
    if match is None:
        raise ValueError(f"{size!r} is no size")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _declared(field: "Field[Any]", hint: Any) -> Declared | None:
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, Setting):
            return Declared(field.name, hint.__origin__, field.default, note)
    return None
