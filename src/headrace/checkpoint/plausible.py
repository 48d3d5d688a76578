"""Numbers of a model's files that make no sense by themselves, refused by name."""

from collections.abc import Mapping
from pathlib import Path

from headrace.errors import ModelError

# More than any number of a model, and few enough for arithmetic.
_IMPLAUSIBLE = 1 << 40


def check_sizes(path: Path, sizes: Mapping[str, object]) -> None:
    """Raises ModelError for a size that is no whole number above zero, or beyond any model's."""
    for name, value in sizes.items():
        if not isinstance(value, int) or not 0 < value < _IMPLAUSIBLE:
            raise _senseless(path, name, value)


def check_rates(path: Path, rates: Mapping[str, object]) -> None:
    """Raises ModelError for a number that is not above zero, or beyond any model's."""
    for name, value in rates.items():
        # Written so that NaN is refused, too.
        if not isinstance(value, int | float) or not 0 < value < _IMPLAUSIBLE:
            raise _senseless(path, name, value)


def _senseless(path: Path, name: str, value: object) -> ModelError:
    return ModelError(f"model {path}: {name} is {str(value)[:50]}")
