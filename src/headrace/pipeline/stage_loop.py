"""What one stage does, written once and without I/O: a generator of effects.

The loop holds the two contracts (docs/architecture.md). It never decides from its own state
whether to communicate: which transfers a step has follows from its plan and from the stage's
place in the pipeline alone.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.pipeline.effects import (
    Compute,
    Effect,
    EmitResult,
    PostReceive,
    Send,
    StepDone,
    TakePlans,
    Wait,
)
from headrace.pipeline.feedback import FeedbackRing, encode_feedback
from headrace.pipeline.ledger import Channel, Tensors
from headrace.protocol.messages import Result, RowLogprobs
from headrace.protocol.plan import Plan, referenced_steps, row_samples, samples, token_count


class Executor(Protocol):
    """The stage's share of the model with its per-slot state; computes, never communicates."""

    device: torch.device

    def begin(self, plan: Plan) -> None:
        """Apply the plan's admissions and appended blocks."""

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        """Run the rows. inputs: ids int64 [tokens] on the first stage, else activations.

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

    def activations_buffer(self, tokens: int) -> torch.Tensor:
        """A new buffer for the activations of so many tokens."""


@dataclass(frozen=True)
class StageRole:
    """A stage's place in the pipeline, decided once at the start."""

    stage: int
    num_stages: int
    epoch: int
    window: int
    max_rows: int
    blocking_feedback: bool

    @property
    def first(self) -> bool:
        """Whether this stage embeds tokens, and so uses feedback."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage samples tokens, and so makes feedback."""
        return self.stage == self.num_stages - 1

    @property
    def activations_in(self) -> Channel:
        """The edge from the stage before."""
        return Channel(Tensors.ACTIVATIONS, self.stage - 1, self.stage)

    @property
    def activations_out(self) -> Channel:
        """The edge to the stage after."""
        return Channel(Tensors.ACTIVATIONS, self.stage, self.stage + 1)

    @property
    def feedback_edge(self) -> Channel | None:
        """The edge from the last stage to the first; None if they are the same stage."""
        if self.num_stages == 1:
            return None
        return Channel(Tensors.FEEDBACK, self.num_stages - 1, 0)


class PlanOrderError(Exception):
    """A plan is missing or came twice: a fault in Headrace, never the user's."""


def stage_loop(role: StageRole, executor: Executor) -> Generator[Effect, Any, None]:
    """Run plans until Stop, then drain every transfer still open."""
    stage = _Stage(role, executor)
    held: deque[Plan] = deque()
    next_step = 0
    stopping = False
    while held or not stopping:
        for message in (yield TakePlans(wait=not held)):
            if message.epoch != role.epoch:
                continue
            if not isinstance(message, Plan):
                stopping = True
                continue
            if message.step != next_step:
                raise PlanOrderError(f"got plan {message.step}, due was plan {next_step}")
            next_step += 1
            yield from stage.post_receives(message)
            held.append(message)
        if held:
            yield from stage.run(held.popleft())
    yield from stage.drain()


class _Stage:
    def __init__(self, role: StageRole, executor: Executor) -> None:
        self._role = role
        self._executor = executor
        self._ring = FeedbackRing(role.window, role.max_rows, executor.device)
        self._feedback_due: set[int] = set()
        self._sent: dict[Channel, deque[int]] = {}

    def post_receives(self, plan: Plan) -> Generator[Effect, Any, None]:
        """Start every receive that the plan entails, as soon as the plan is held."""
        role = self._role
        if not plan.rows:
            return
        if not role.first:
            buffer = self._executor.activations_buffer(token_count(plan))
            yield PostReceive(role.activations_in, plan.step, buffer)
        if role.first and samples(plan):
            # The engine has the result of the place's former step, or this plan would not exist:
            # completing its feedback cannot take long.
            yield from self._complete_feedback(self._ring.occupant(plan.step))
            buffer = self._ring.claim(plan.step, len(plan.rows))
            if role.feedback_edge is not None:
                yield PostReceive(role.feedback_edge, plan.step, buffer)
                self._feedback_due.add(plan.step)

    def run(self, plan: Plan) -> Generator[Effect, Any, None]:
        """One step of this stage."""
        role, executor = self._role, self._executor
        executor.begin(plan)
        tokens: list[list[int]] = []
        logprobs: list[RowLogprobs] = []
        if plan.rows:
            inputs = yield from self._inputs(plan)
            output = yield Compute("forward", plan.step, lambda: executor.forward(plan, inputs))
            if role.last:
                tokens, logprobs = yield from self._sample(plan, output)
            else:
                yield from self._send(role.activations_out, plan.step, output)
            if role.first and role.blocking_feedback:
                yield from self._complete_feedback(plan.step)
        executor.end(plan)
        if role.last:
            yield EmitResult(Result(role.epoch, plan.step, tokens, logprobs))
        yield StepDone(plan.step)

    def _sample(
        self, plan: Plan, activations: torch.Tensor
    ) -> Generator[Effect, Any, tuple[list[list[int]], list[RowLogprobs]]]:
        """Each row's tokens and reports. The feedback goes first: somebody waits for it."""
        executor = self._executor
        rows: list[list[int]] = [[] for _ in plan.rows]
        logits = tokens = None
        if samples(plan):
            logits = yield Compute("forward", plan.step, lambda: executor.logits(plan, activations))
            tokens = yield Compute("sample", plan.step, lambda: executor.sample(plan, logits))
            sampling = [n for n, row in enumerate(plan.rows) if row_samples(row)]
            yield from self._feed_back(plan.step, encode_feedback(tokens, sampling, len(plan.rows)))
            for row, token in zip(sampling, tokens.tolist(), strict=True):
                rows[row] = [token]
        logprobs = yield Compute(
            "sample", plan.step, lambda: executor.logprobs(plan, activations, logits, tokens)
        )
        return rows, logprobs

    def drain(self) -> Generator[Effect, Any, None]:
        """Complete everything that nobody waited for."""
        for step in sorted(self._feedback_due):
            yield from self._complete_feedback(step)
        for channel, steps in self._sent.items():
            while steps:
                yield Wait(channel, steps.popleft())

    def _inputs(self, plan: Plan) -> Generator[Effect, Any, torch.Tensor]:
        if not self._role.first:
            activations: torch.Tensor = yield Wait(self._role.activations_in, plan.step)
            return activations
        for step in referenced_steps(plan):
            yield from self._complete_feedback(step)
        return self._ring.input_ids(plan)

    def _complete_feedback(self, step: int | None) -> Generator[Effect, Any, None]:
        if step in self._feedback_due:
            assert step is not None
            assert self._role.feedback_edge is not None
            yield Wait(self._role.feedback_edge, step)
            self._feedback_due.remove(step)

    def _feed_back(self, step: int, feedback: torch.Tensor) -> Generator[Effect, Any, None]:
        edge = self._role.feedback_edge
        if edge is None:
            self._ring.buffer(step).copy_(feedback)
        else:
            yield from self._send(edge, step, feedback)

    def _send(
        self, channel: Channel, step: int, tensor: torch.Tensor
    ) -> Generator[Effect, Any, None]:
        """Send, and complete sends that are a window old: their receivers are long past them."""
        steps = self._sent.setdefault(channel, deque())
        while steps and steps[0] <= step - self._role.window:
            yield Wait(channel, steps.popleft())
        yield Send(channel, step, tensor)
        steps.append(step)
