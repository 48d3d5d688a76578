"""A stage that computes nothing and takes a given time, to measure everything but a model."""

import time
from dataclasses import dataclass, field

import torch

from headrace.protocol.messages import RowLogprobs, SyntheticTime
from headrace.protocol.plan import Plan, row_samples

# A sleep ends up to so much too late.
_AWAKE_S = 300e-6


@dataclass
class SyntheticExecutor:
    """An Executor like one on a device: forward() returns at once, and synchronize() when the time
    for the plan's rows is over. Token 0 is sampled.

    device: where the activations are, [tokens, hidden_size] of dtype. real_time: whether time has
    to pass; in virtual time it does not, and the stages are told seconds().
    """

    stage_time: SyntheticTime
    hidden_size: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    real_time: bool = True
    asynchronous: bool = field(default=True, init=False)
    _ends_at: float = field(default=0.0, init=False)

    def begin(self, plan: Plan) -> None:
        """Nothing to keep."""

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        """Activations of zeros."""
        self._ends_at = time.monotonic() + self.seconds(plan)
        return torch.zeros(len(inputs), self.hidden_size, dtype=self.dtype, device=self.device)

    def synchronize(self) -> None:
        """Return when the time of the last forward() is over.

        Asleep but for the end, since a sleep ends late; so a host waits for a device, too.
        """
        if self.real_time:
            time.sleep(max(0.0, self._ends_at - _AWAKE_S - time.monotonic()))
            while time.monotonic() < self._ends_at:
                pass

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

    def forget(self) -> None:
        """Nothing was kept."""

    def activations_buffer(self, tokens: int) -> torch.Tensor:
        """A new buffer for so many tokens' activations."""
        return torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def passed_on(self, activations: torch.Tensor) -> torch.Tensor:
        """All of them, whatever the shard: nobody adds up here."""
        return activations

    def seconds(self, plan: Plan) -> float:
        """What the step takes."""
        return self.stage_time.fixed_s + self.stage_time.per_row_s * len(plan.rows)
