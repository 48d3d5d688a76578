"""What a client may ask of the choice of tokens."""

from typing import Any, Literal, get_args, get_origin

import msgspec

from headrace.errors import UsageError

MAX_SEED = 2**63 - 1


def check_type(name: str, value: object, kind: Any) -> None:
    """Raises UsageError naming the setting if its value is not of the annotated type."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        reason = f"must be one of {', '.join(choices)}" if choices else str(error).lower()
        raise UsageError(f"{name} {value!r}: {reason}") from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen, with vLLM's names and meanings.

    temperature: 0 takes the likeliest token, above 0 draws from softmax(logits / temperature).
    max_tokens: at most so many output tokens.
    seed: fixes the random numbers of this request; None derives one from the engine's seed.
    stop_token_ids: output tokens that end the sequence, besides the model's end-of-text tokens.
    ignore_eos: go on after an end-of-text token.

    Raises UsageError (a ValueError) that names field, value and range.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # msgspec checks types when it decodes, not when Python code builds the object.
        for field in msgspec.structs.fields(type(self)):
            check_type(field.name, getattr(self, field.name), field.type)
        if not 0.0 <= self.temperature <= 100.0:
            raise UsageError(f"temperature must be from 0 to 100, not {self.temperature}")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be from 0 to {MAX_SEED}, not {self.seed}")
        for token in self.stop_token_ids:
            if token < 0:
                raise UsageError(f"stop_token_ids must not be negative, found {token}")
