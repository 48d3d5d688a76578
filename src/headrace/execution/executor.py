"""What a stage loop asks of whatever computes its steps."""

from typing import Protocol

import torch

from headrace.protocol.messages import RowLogprobs
from headrace.protocol.plan import Plan


class PlanOrderError(Exception):
    """A plan is missing or came twice: a fault in Headrace, never the user's."""


class Executor(Protocol):
    """The stage's share of the model with its per-slot state; computes, never communicates."""

    device: torch.device

    @property
    def asynchronous(self) -> bool:
        """Whether forward() and logits() return before the device has done the work."""

    def synchronize(self) -> None:
        """Return once the device has done everything that it was given."""

    def begin(self, plan: Plan) -> None:
        """Apply the plan's admissions and appended blocks."""

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        """Run the rows. inputs: ids int64 [tokens] on the first stage, else what was received.

        Returns activations [tokens, hidden].
        """

    def logits(self, plan: Plan, activations: torch.Tensor) -> torch.Tensor:
        """On the last stage: scores [sampling rows, vocab] of the rows that sample."""

    def sample(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """Tokens of the rows that sample, in row order, int64 [sampling rows]."""

    def logprobs(
        self,
        plan: Plan,
        activations: torch.Tensor,
        logits: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> list[RowLogprobs]:
        """What rows report besides their tokens; logits and tokens are None if no row samples."""

    def end(self, plan: Plan) -> None:
        """Apply the plan's releases."""

    def forget(self) -> None:
        """A new epoch begins: everything about sequences is void. Memory stays."""

    def activations_buffer(self, tokens: int) -> torch.Tensor:
        """A new buffer for what this rank receives of the activations of so many tokens."""

    def passed_on(self, activations: torch.Tensor) -> torch.Tensor:
        """What this rank sends of activations that forward() returned."""
