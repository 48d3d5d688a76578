"""A sequence from the engine's side: its tokens, and how far its work is planned."""

from dataclasses import dataclass, field
from typing import Literal

from headrace.protocol.plan import TokenRef
from headrace.protocol.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(eq=False)
class Sequence:
    """One completion of one request.

    prompt: token ids, at least one. outputs: the tokens accepted from results. seed: fixes its
    random numbers. planned_positions: positions whose forward pass is in some plan.
    planned_outputs: tokens that plans asked to be sampled, accepted or still on their way.
    newest_sample: the reference to the newest of those.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_outputs: int
    outputs: list[int] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    reserved_blocks: int = 0
    planned_positions: int = 0
    planned_outputs: int = 0
    newest_sample: TokenRef | None = None
    microbatch: int | None = None
    finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether no further token of it will be accepted."""
        return self.finish_reason is not None

    @property
    def prompt_planned(self) -> bool:
        """Whether every prompt position is in some plan."""
        return self.planned_positions >= len(self.prompt)

    @property
    def max_positions(self) -> int:
        """Positions it can ever compute: its last output token is sampled, never computed."""
        return len(self.prompt) + self.max_outputs - 1


def next_input(sequence: Sequence) -> int | TokenRef:
    """The token at the next position to plan, as an id once accepted, else as a reference."""
    index = sequence.planned_positions - len(sequence.prompt)
    if index < len(sequence.outputs):
        return sequence.outputs[index]
    assert sequence.newest_sample is not None
    return sequence.newest_sample
