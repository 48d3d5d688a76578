"""What one stage does, written once and without I/O: a generator of effects.

The loop holds the two contracts (docs/contracts.md). It never decides from its own state
whether to communicate: which transfers a step has follows from its plan and from the stage's
place in the pipeline alone.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from headrace.execution.executor import Executor, PlanOrderError
from headrace.pipeline.effects import (
    Compute,
    Effect,
    EmitResult,
    Finish,
    PostReceive,
    Send,
    Start,
    StepDone,
    TakePlans,
    Wait,
)
from headrace.pipeline.feedback import Feedback, FeedbackRing, InputIds
from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import feedback_edges
from headrace.protocol.messages import Result, RowLogprobs
from headrace.protocol.plan import Plan, samples, token_count
from headrace.protocol.ranks import Ranks

# Sends that are completed together.
_SENDS_AT_ONCE = 8
# Beyond it sends are completed sooner than after a window.
_HELD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class StageRole:
    """A rank's place in the pipeline, decided once at the start."""

    rank: int
    ranks: Ranks
    epoch: int
    window: int
    max_rows: int
    blocking_feedback: bool

    @property
    def stage(self) -> int:
        """The stage that this rank is a shard of."""
        return self.ranks.stage_of(self.rank)

    @property
    def first(self) -> bool:
        """Whether this stage embeds tokens, and so uses feedback."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage samples tokens, and so makes feedback."""
        return self.stage == self.ranks.num_stages - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank tells the engine what was sampled: one shard of the last stage does."""
        return self.last and self.ranks.shard_of(self.rank) == 0

    @property
    def activations_in(self) -> Channel:
        """The edge from the same shard of the stage before."""
        return Channel(Tensors.ACTIVATIONS, self.rank - self.ranks.num_shards, self.rank)

    @property
    def activations_out(self) -> Channel:
        """The edge to the same shard of the stage after."""
        return Channel(Tensors.ACTIVATIONS, self.rank, self.rank + self.ranks.num_shards)

    @property
    def feedback_in(self) -> Channel | None:
        """The edge from the rank that samples; None for that rank itself, and where feedback is
        not used."""
        own = (edge for edge in feedback_edges(self.ranks) if edge.target == self.rank)
        return next(own, None)

    @property
    def feedback_out(self) -> list[Channel]:
        """The edges to the ranks that use feedback, if this one samples, but for itself."""
        return [edge for edge in feedback_edges(self.ranks) if edge.source == self.rank]


def stage_loop(role: StageRole, executor: Executor) -> Generator[Effect, Any, None]:
    """Run plans until Stop, then drain every transfer still open."""
    stage = _Stage(role, executor)
    while stage.held or not stage.stopping:
        if not (stage.held and executor.asynchronous):
            yield from stage.take_plans(wait=not stage.held)
        if stage.held:
            yield from stage.run(stage.held.popleft())
    yield from stage.drain()


class _Stage:
    """held: plans taken and not run yet, oldest first. stopping: none will come any more."""

    def __init__(self, role: StageRole, executor: Executor) -> None:
        self.held: deque[Plan] = deque()
        self.stopping = False
        self._role = role
        self._executor = executor
        self._next_step = 0
        self._ring = FeedbackRing(role.window, role.max_rows, executor.device)
        self._feedback_in, self._feedback_out = role.feedback_in, role.feedback_out
        self._feedback_due: set[int] = set()
        # Sends that are not completed: step and bytes.
        self._sent: dict[Channel, deque[tuple[int, int]]] = {}

    def take_plans(self, wait: bool) -> Generator[Effect, Any, None]:
        """Take what arrived, and post the receives of every plan at once."""
        for message in (yield TakePlans(wait)):
            if message.epoch != self._role.epoch:
                continue
            if not isinstance(message, Plan):
                self.stopping = True
                continue
            if message.step != self._next_step:
                raise PlanOrderError(f"got plan {message.step}, due was plan {self._next_step}")
            self._next_step += 1
            yield from self.post_receives(message)
            self.held.append(message)

    def post_receives(self, plan: Plan) -> Generator[Effect, Any, None]:
        """Start every receive that the plan entails."""
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
            if self._feedback_in is not None:
                yield PostReceive(self._feedback_in, plan.step, buffer)
                self._feedback_due.add(plan.step)

    def run(self, plan: Plan) -> Generator[Effect, Any, None]:
        """One step of this stage."""
        role, executor = self._role, self._executor
        executor.begin(plan)
        tokens: list[list[int]] = []
        logprobs: list[RowLogprobs] = []
        if plan.rows:
            # Before anything is waited for: so it takes nobody's time.
            feedback = Feedback(plan) if role.speaks and samples(plan) else None
            inputs = yield from self._inputs(plan)
            output, logits = yield from self._forward(plan, inputs)
            if role.last:
                tokens, logprobs = yield from self._sample(plan, feedback, output, logits)
            else:
                passed_on = executor.passed_on(output)
                yield from self._send(role.activations_out, plan.step, passed_on)
            if role.first and role.blocking_feedback:
                yield from self._complete_feedback(plan.step)
        executor.end(plan)
        if role.speaks:
            yield EmitResult(Result(role.epoch, plan.step, tokens, logprobs))
        yield StepDone(plan.step)

    def _forward(
        self, plan: Plan, inputs: torch.Tensor
    ) -> Generator[Effect, Any, tuple[torch.Tensor, torch.Tensor | None]]:
        """Activations, and on the last stage the scores of the rows that sample, if any do."""
        executor = self._executor

        def work() -> tuple[torch.Tensor, torch.Tensor | None]:
            activations = executor.forward(plan, inputs)
            with_logits = self._role.last and samples(plan)
            return activations, executor.logits(plan, activations) if with_logits else None

        if not executor.asynchronous:
            output: tuple[torch.Tensor, torch.Tensor | None]
            output = yield Compute("forward", plan.step, work)
            return output
        output = yield Start("forward", plan.step, work)
        # While the device computes this costs the step nothing.
        yield from self.take_plans(wait=False)
        yield Finish("forward", plan.step, executor.synchronize)
        return output

    def _sample(
        self,
        plan: Plan,
        feedback: Feedback | None,
        activations: torch.Tensor,
        logits: torch.Tensor | None,
    ) -> Generator[Effect, Any, tuple[list[list[int]], list[RowLogprobs]]]:
        """Each row's tokens and reports. The feedback goes first: somebody waits for it."""
        executor = self._executor
        rows: list[list[int]] = [[] for _ in plan.rows]
        sampled = None
        if feedback is not None and logits is not None:
            sampled = yield Compute("sample", plan.step, lambda: executor.sample(plan, logits))
            tokens = sampled.tolist()
            yield from self._feed_back(plan.step, feedback.encode(tokens, executor.device))
            for row, token in zip(feedback.rows, tokens, strict=True):
                rows[row] = [token]
        logprobs = yield Compute(
            "sample", plan.step, lambda: executor.logprobs(plan, activations, logits, sampled)
        )
        return rows, logprobs

    def drain(self) -> Generator[Effect, Any, None]:
        """Complete everything that nobody waited for."""
        for step in sorted(self._feedback_due):
            yield from self._complete_feedback(step)
        for channel, sent in self._sent.items():
            while sent:
                yield Wait(channel, sent.popleft()[0])

    def _inputs(self, plan: Plan) -> Generator[Effect, Any, torch.Tensor]:
        if not self._role.first:
            activations: torch.Tensor = yield Wait(self._role.activations_in, plan.step)
            return activations
        inputs = InputIds(plan)
        for step in inputs.steps:
            yield from self._complete_feedback(step)
        return self._ring.gather(inputs)

    def _complete_feedback(self, step: int | None) -> Generator[Effect, Any, None]:
        if step in self._feedback_due:
            assert step is not None
            assert self._feedback_in is not None
            yield Wait(self._feedback_in, step)
            self._feedback_due.remove(step)

    def _feed_back(self, step: int, feedback: torch.Tensor) -> Generator[Effect, Any, None]:
        for edge in self._feedback_out:
            yield from self._send(edge, step, feedback)
        if self._role.first:
            self._ring.buffer(step).copy_(feedback)

    def _send(
        self, channel: Channel, step: int, tensor: torch.Tensor
    ) -> Generator[Effect, Any, None]:
        """Send, and now and then complete sends older than a window: their receivers are long past
        them, and many at a time cost less than one a step."""
        sent = self._sent.setdefault(channel, deque())
        keep = self._role.window
        if sum(size for _, size in sent) > _HELD_BYTES:
            # Large ones take long to compute: these, too, have left.
            keep = min(keep, self._role.ranks.num_stages + 2)
        if len(sent) >= keep + _SENDS_AT_ONCE:
            while sent and sent[0][0] <= step - keep:
                yield Wait(channel, sent.popleft()[0])
        yield Send(channel, step, tensor)
        sent.append((step, tensor.nbytes))
