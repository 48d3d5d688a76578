"""What a stage waits for and sends, effect by effect."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headrace.execution.executor import PlanOrderError
from headrace.pipeline.effects import (
    Compute,
    EmitResult,
    Finish,
    PostReceive,
    Send,
    Start,
    TakePlans,
    Wait,
)
from headrace.pipeline.ledger import Tensors
from headrace.pipeline.stage_loop import StageRole, stage_loop
from headrace.protocol.messages import RowLogprobs, Stop
from headrace.protocol.plan import Plan, Row, TokenRef, Yield
from headrace.protocol.ranks import Ranks


@dataclass
class Executor:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    asynchronous: bool = False
    inputs: list[list[int]] = field(default_factory=list)

    def synchronize(self) -> None: ...

    def begin(self, plan: Plan) -> None: ...

    def end(self, plan: Plan) -> None: ...

    def forward(self, plan: Plan, inputs: torch.Tensor) -> torch.Tensor:
        self.inputs.append(inputs.flatten().tolist())
        return torch.zeros(len(inputs), 1)

    def logits(self, plan: Plan, activations: torch.Tensor) -> torch.Tensor:
        return activations

    def sample(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor([7] * sum(row.yields & Yield.TOKEN for row in plan.rows))

    def logprobs(
        self,
        plan: Plan,
        activations: torch.Tensor,
        logits: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> list[RowLogprobs]:
        return []

    def forget(self) -> None:
        pass

    def activations_buffer(self, tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, 1)

    def passed_on(self, activations: torch.Tensor) -> torch.Tensor:
        return activations


def plan(step: int, *rows: Row, epoch: int = 0) -> Plan:
    return Plan(epoch, step, 0, list(rows), [], [], [])


def chunk(count: int = 3) -> Row:
    return Row(0, [1] * count, 0, Yield.NOTHING)


def prompt() -> Row:
    return Row(0, [1], 0, Yield.TOKEN)


def decode(step: int) -> Row:
    return Row(0, [TokenRef(step, 0)], None, Yield.TOKEN)


def run(
    stage: int,
    num_stages: int,
    arrivals: list[list[Plan | Stop]],
    blocking: bool = False,
    window: int = 4,
    executor: Executor | None = None,
) -> list[str]:
    """Drive one stage with plans that arrive in batches; returns what it did, in words."""
    role = StageRole(stage, Ranks(num_stages), 0, window, 4, blocking)
    loop = stage_loop(role, executor or Executor())
    buffers: dict[tuple[Any, int], torch.Tensor] = {}
    batches = list(arrivals)
    trace: list[str] = []
    effect = next(loop)
    while True:
        value: Any = None
        match effect:
            case TakePlans():
                value = batches.pop(0) if batches else []
            case PostReceive(channel, step, buffer):
                buffers[channel, step] = buffer
                trace.append(f"post {channel.tensors} {step}")
            case Send(channel, step, tensor):
                buffers[channel, step] = tensor
                trace.append(f"send {channel.tensors} {step}")
            case Wait(channel, step):
                sent = channel.source == stage
                trace.append(f"{'complete' if sent else 'wait'} {channel.tensors} {step}")
                value = buffers.pop((channel, step))
                if channel.tensors is Tensors.FEEDBACK and not sent:
                    value[:, 0], value[:, 1] = 1, 40 + step
            case Start(kind, step, work):
                trace.append(f"start {kind} {step}")
                value = work()
            case Finish(kind, step, _):
                trace.append(f"finish {kind} {step}")
            case Compute(kind, step, work):
                trace.append(f"{kind} {step}")
                value = work()
            case EmitResult(result):
                trace.append(f"result {result.step} {result.tokens}")
        try:
            effect = loop.send(value)
        except StopIteration:
            return trace


def test_receives_are_posted_for_every_plan_held_before_the_first_one_runs() -> None:
    trace = run(1, 3, [[plan(0, prompt()), plan(1, decode(0)), plan(2, decode(1)), Stop(0)]])
    assert trace[:3] == ["post activations 0", "post activations 1", "post activations 2"]


def test_the_first_stage_waits_for_feedback_only_where_it_is_consumed() -> None:
    plans = [plan(0, prompt()), plan(1, chunk()), plan(2, decode(0))]
    assert run(0, 2, [[*plans, Stop(0)]]) == [
        "post feedback 0",
        "post feedback 2",
        "forward 0",
        "send activations 0",
        "forward 1",
        "send activations 1",
        "wait feedback 0",
        "forward 2",
        "send activations 2",
        # Draining: what nobody refers to is completed too.
        "wait feedback 2",
        "complete activations 0",
        "complete activations 1",
        "complete activations 2",
    ]


def test_blocking_feedback_waits_right_after_the_activations_are_sent() -> None:
    trace = run(0, 2, [[plan(0, prompt()), plan(1, decode(0)), Stop(0)]], blocking=True)
    sent = trace.index("send activations 0")
    assert trace[sent + 1] == "wait feedback 0"


def test_a_plan_of_chunks_only_has_no_feedback() -> None:
    for stage in (0, 1):
        trace = run(stage, 2, [[plan(0, chunk()), plan(1, chunk()), Stop(0)]])
        assert not any("feedback" in line for line in trace)
    assert "result 0 [[]]" in run(1, 2, [[plan(0, chunk()), Stop(0)]])


def test_the_last_stage_sends_feedback_as_soon_as_it_has_sampled() -> None:
    trace = run(1, 2, [[plan(0, prompt()), Stop(0)]])
    # Reports are worked out after the send.
    assert trace[2:6] == ["forward 0", "sample 0", "send feedback 0", "sample 0"]
    assert trace[6] == "result 0 [[7]]"


def test_a_plan_without_rows_moves_no_tensor_but_has_a_result() -> None:
    assert run(0, 2, [[plan(0), Stop(0)]]) == []
    assert run(1, 2, [[plan(0), Stop(0)]]) == ["result 0 []"]


def test_a_single_stage_looks_its_own_tokens_up() -> None:
    executor = Executor()
    trace = run(0, 1, [[plan(0, prompt()), plan(1, decode(0)), Stop(0)]], executor=executor)
    assert executor.inputs == [[1], [7]]
    assert not any("feedback" in line or "activations" in line for line in trace)


def test_references_are_gathered_from_the_step_and_row_they_name() -> None:
    executor = Executor()
    rows = [Row(s, [TokenRef(0, s)], None, Yield.TOKEN) for s in (2, 0)]
    first = plan(0, *(Row(s, [1], 0, Yield.TOKEN) for s in range(3)))
    run(0, 2, [[first, plan(1, *rows, Row(5, [9], 4, Yield.TOKEN)), Stop(0)]], executor=executor)
    assert executor.inputs[1] == [40, 40, 9]


def test_every_step_that_is_referred_to_is_waited_for() -> None:
    first = [plan(0, prompt()), plan(1, prompt())]
    rows = [
        Row(0, [TokenRef(0, 0)], None, Yield.TOKEN),
        Row(1, [TokenRef(1, 0)], None, Yield.TOKEN),
    ]
    trace = run(0, 2, [[*first, plan(2, *rows), Stop(0)]])
    before = trace[: trace.index("forward 2")]
    assert before[-2:] == ["wait feedback 0", "wait feedback 1"]


def test_sends_older_than_a_window_are_completed_some_at_a_time() -> None:
    plans = [plan(step, chunk()) for step in range(13)]
    trace = run(0, 2, [[*plans, Stop(0)]], window=2)
    # Of ten that are open those of steps 0 to 8 are two steps old or older.
    sent = trace.index("send activations 10")
    assert trace[sent - 9 : sent] == [f"complete activations {step}" for step in range(9)]


def test_plans_that_come_while_a_device_computes_are_taken_and_their_receives_posted() -> None:
    executor = Executor(asynchronous=True)
    arrivals: list[list[Plan | Stop]] = [[plan(0, chunk())], [plan(1, chunk())], [Stop(0)]]
    trace = run(1, 3, arrivals, executor=executor)
    assert trace[:8] == [
        "post activations 0",
        "wait activations 0",
        "start forward 0",
        "post activations 1",
        "finish forward 0",
        "send activations 0",
        "wait activations 1",
        "start forward 1",
    ]


def test_plans_of_another_epoch_are_dropped() -> None:
    assert run(1, 2, [[plan(0, epoch=1), Stop(1), plan(0), Stop(0)]]) == ["result 0 []"]


@pytest.mark.parametrize("steps", [[0, 2], [0, 0], [1]])
def test_a_gap_or_a_repeated_plan_is_an_error(steps: list[int]) -> None:
    with pytest.raises(PlanOrderError, match="due was plan"):
        run(0, 2, [[*(plan(step) for step in steps), Stop(0)]])
