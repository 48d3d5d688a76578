"""The pipeline between engine and stages in a simulation: sees everything that the engine sends."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.errors import PipelineError
from headrace.protocol.messages import Report, Result, Timeline
from headrace.protocol.plan import Plan, TokenRef, Yield, samples
from headrace.simulation.virtual_stages import VirtualStages

# Far beyond what any simulated load needs.
_MOST_STEPS = 3000


class SimulationError(Exception):
    """The engine did what it must not."""


@dataclass
class Watched:
    """The pipeline between engine and stages: sees every plan and counts what the seeds reach.

    One for each epoch; reached goes on from one to the next. stray: whether it is time to send a
    stage a plan of another epoch. killed: the stages of the epoch before, whose last messages come
    late.
    """

    stages: VirtualStages
    epoch: int
    num_ranks: int
    window: int
    stray: Callable[[], bool]
    reached: Counter[str] = field(default_factory=Counter)
    killed: VirtualStages | None = None
    plans: list[Plan] = field(default_factory=list)
    messages: int = 0
    # By number, the slots that go by the rules which the last stage has.
    rules: dict[int, set[int]] = field(default_factory=dict)
    _numbers: set[int] = field(default_factory=set)

    def send(self, plan: Plan) -> None:
        if (plan.epoch, plan.step) != (self.epoch, len(self.plans)):
            raise SimulationError(
                f"plan {plan.step} of epoch {plan.epoch} was sent in place of plan "
                f"{len(self.plans)} of epoch {self.epoch}"
            )
        for row in plan.rows:
            for token in row.inputs:
                # Contract 1, point 3: only what the engine does not have is referred to.
                if isinstance(token, TokenRef) and not 0 < plan.step - token.step < self.window:
                    raise SimulationError(f"step {plan.step} refers to step {token.step}")
        if len(self.plans) == _MOST_STEPS:
            raise SimulationError(f"not done after {_MOST_STEPS} steps")
        self.plans.append(plan)
        self._count(plan)
        self._follow_rules(plan)
        if self.stray():
            for rank in range(self.num_ranks):
                self.stages.send_to(rank, replace(plan, epoch=plan.epoch + 1))
            self.reached["plan of another epoch"] += 1
        self.stages.send(plan)

    def _follow_rules(self, plan: Plan) -> None:
        """Rules are sent once, before they are named, and dropped when nobody goes by them."""
        for rules in plan.rules:
            if rules.number in self._numbers:
                raise SimulationError(f"step {plan.step} sends rules {rules.number} again")
            self._numbers.add(rules.number)
            self.rules[rules.number] = set()
        for admission in plan.admitted:
            if admission.rules is not None:
                if admission.rules not in self.rules:
                    raise SimulationError(f"step {plan.step} names rules {admission.rules}")
                self.reached["rules shared"] += bool(self.rules[admission.rules])
                self.reached["rules kept over a preemption"] += bool(admission.outputs)
                self.rules[admission.rules].add(admission.slot)
        for slots in self.rules.values():
            slots.difference_update(plan.released)
        for number in plan.dropped:
            if self.rules.pop(number, None) != set():
                raise SimulationError(f"step {plan.step} drops rules {number} that are in use")

    def receive(self, timeout_s: float) -> list[Result | Report]:
        messages = self.stages.receive(timeout_s)
        if self.killed is not None:
            with suppress(PipelineError):
                late = self.killed.receive(0.0)
                self.reached["message of a lost epoch"] += len(late)
                messages = late + messages
        self.messages += len(messages)
        return messages

    def timelines(self, last: int, timeout_s: float) -> list[Timeline]:
        return self.stages.timelines(last, timeout_s)

    def signs_of_life(self) -> list[float]:
        return self.stages.signs_of_life()

    def _count(self, plan: Plan) -> None:
        inputs = [token for row in plan.rows for token in row.inputs]
        chunks = any(len(row.inputs) > 1 or row.yields == Yield.NOTHING for row in plan.rows)
        decodes = any(row.start is None for row in plan.rows)
        references = any(isinstance(token, TokenRef) for token in inputs)
        for name, is_so in {
            "reference": references,
            "empty plan": not plan.rows,
            "only chunks, no feedback": bool(plan.rows) and not samples(plan),
            "chunks beside decoding rows": chunks and decodes,
            "prefix found": any(admission.computed for admission in plan.admitted),
            "admitted again": any(admission.outputs for admission in plan.admitted),
            "slot given out by the next plan": bool(
                {admission.slot for admission in plan.admitted}.intersection(
                    self.plans[-2].released if len(self.plans) > 1 else ()
                )
            ),
        }.items():
            self.reached[name] += is_so


def in_one_line(event: object) -> str:
    """An event in one line: without contents of tensors, functions and token lists."""
    if isinstance(event, Plan):
        rows = [(row.slot, len(row.inputs), row.yields.value) for row in event.rows]
        admitted = [admission.slot for admission in event.admitted]
        references = sorted(
            {(t.step, t.row) for row in event.rows for t in row.inputs if isinstance(t, TokenRef)}
        )
        return (
            f"plan {event.step} of epoch {event.epoch}, group {event.microbatch}: rows (slot, "
            f"tokens, yields) {rows}, refers to {references}, admitted {admitted}, "
            f"released {event.released}"
        )
    fields = {name: getattr(event, name, None) for name in ("channel", "kind", "step", "result")}
    if fields["channel"] is not None:
        tensors, source, target = fields["channel"]
        fields["channel"] = f"{tensors} {source}->{target}"
    shown = ", ".join(str(value) for value in fields.values() if value is not None)
    return f"{type(event).__name__} {shown}"
