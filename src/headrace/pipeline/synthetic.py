"""A stage that computes nothing and takes a given time, to measure everything but a model."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.protocol.messages import RowLogprobs, SyntheticTime
from headrace.protocol.plan import Plan, row_samples


@dataclass
class SyntheticExecutor:
    """An Executor whose forward() lasts stage_time for the plan's rows, asleep. Token 0 is sampled.

    device: where the activations are, [tokens, hidden_size] of dtype. sleep: lets seconds pass; in
    virtual time nothing does, and the stages are told seconds().
    """

    stage_time: SyntheticTime
    hidden_size: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sleep: Callable[[float], None] = time.sleep

    def begin(self, plan: Plan) -> None:
        """Nothing to keep."""

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        """Activations of zeros, once the time is over."""
        ends_at = time.monotonic() + self.seconds(plan)
        activations = torch.zeros(
            len(inputs), self.hidden_size, dtype=self.dtype, device=self.device
        )
        self.sleep(max(0.0, ends_at - time.monotonic()))
        return activations

    def logits(self, plan: Plan, activations: torch.Tensor) -> torch.Tensor:
        """One score a row that samples."""
        sampling = sum(row_samples(row) for row in plan.rows)
        return torch.zeros(sampling, 1, device=self.device)

    def sample(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """Token 0 for each."""
        return torch.zeros(len(logits), dtype=torch.int64, device=self.device)

    def logprobs(
        self,
        plan: Plan,
        activations: torch.Tensor,
        logits: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> list[RowLogprobs]:
        """None."""
        return []

    def end(self, plan: Plan) -> None:
        """Nothing to keep."""

    def activations_buffer(self, tokens: int) -> torch.Tensor:
        """A new buffer for so many tokens' activations."""
        return torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def seconds(self, plan: Plan) -> float:
        """What the step takes."""
        return self.stage_time.fixed_s + self.stage_time.per_row_s * len(plan.rows)
