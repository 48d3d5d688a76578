"""Who notes what an engine plans and what comes of it: benches, at the engine's construction."""

from typing import Protocol

from headrace.engine.step_cost import StepWork
from headrace.protocol.messages import Report, Result
from headrace.protocol.plan import Plan


class Recorder(Protocol):
    """Called in the engine's thread: what a call takes, the engine has not."""

    def on_plan(self, plan: Plan, num_microbatches: int) -> None:
        """A plan was made, and is about to be sent. num_microbatches: groups that take turns."""

    def on_result(self, result: Result) -> None:
        """A result was taken in: its tokens are accepted, and their texts made."""

    def on_report(self, report: Report, work: StepWork, predicted_s: float) -> None:
        """A report is about to be taken in. work: what the step carries. predicted_s: what it was
        taken to cost the stage, in seconds, before this."""
