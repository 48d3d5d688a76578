"""What the steps of a stage without neighbours take, and how much of that its kernels do.

Recorded plans run through the real stage loop, over a real control socket, with messages encoded
and decoded. At the socket's other end, in the same process, is what stands in for the engine: the
time that it takes is left out.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec
import torch
import zmq

from headrace.bench.kernel_clock import KernelClock, timed_kernels
from headrace.bench.stage_alone import load_executor
from headrace.execution.executor import Executor
from headrace.execution.model_executor import ModelExecutor
from headrace.host.alone import answer_alone
from headrace.host.cpus import StageCpus
from headrace.model.interpreter import Interpreter
from headrace.pipeline.effects import Effect, EmitResult
from headrace.pipeline.stage_loop import StageRole, stage_loop
from headrace.pipeline.stage_worker import ControlSocket, drive
from headrace.pipeline.timeline import RankTimeline
from headrace.protocol import codec
from headrace.protocol.messages import RankConfig, Stop, ToRank
from headrace.protocol.plan import Plan
from headrace.protocol.ranks import Ranks


class StepTime(msgspec.Struct, array_like=True, frozen=True):
    """seconds: from the result of the step before to its own. parts: of these, in kernels, of which
    there were so many calls; by the parts of kernel_clock."""

    seconds: float
    parts: dict[str, float]
    calls: int

    @property
    def python_s(self) -> float:
        """Seconds outside kernels."""
        return self.seconds - sum(self.parts.values())


class _Task(msgspec.Struct, array_like=True):
    config: RankConfig
    cpus: list[int]
    num_blocks: int
    plans: list[Plan]
    rounds: int


def step_times(
    config: RankConfig, cpus: StageCpus, num_blocks: int, plans: list[Plan], rounds: int
) -> list[list[StepTime]]:
    """Each round's times of all plans but the first, which waits for everything to begin.

    config: of the only stage. plans: an epoch's, from step 0 until no sequence is left. They run
    once before, as a warm-up. Raises PipelineError if the process fails.
    """
    task = msgspec.msgpack.encode(_Task(config, cpus.cpus, num_blocks, plans, rounds))
    answer = answer_alone(__name__, f"stage {config.stage} alone", cpus, task)
    return msgspec.msgpack.decode(answer, type=list[list[StepTime]])


@dataclass
class _Stand:
    """Hands a stage its plans as the engine would: `window` ahead, one more for each result."""

    socket: "zmq.Socket[bytes]"
    clock: KernelClock
    messages: list[ToRank]
    window: int
    times: list[StepTime] = field(default_factory=list, init=False)

    def watch(self, loop: Generator[Effect, Any, None]) -> Generator[Effect, Any, None]:
        """The loop, with notes of when its results leave."""
        encoded = [codec.encode(message) for message in self.messages]
        for data in encoded[: self.window]:
            self.socket.send(data)
        left = iter(encoded[self.window :])
        since: float | None = None
        value: Any = None
        while True:
            try:
                effect = loop.send(value)
            except StopIteration:
                return
            value = yield effect
            if not isinstance(effect, EmitResult):
                continue
            now = perf_counter()
            parts, calls = self.clock.take()
            if since is not None:
                self.times.append(StepTime(now - since, parts, calls))
            for data in left:
                self.socket.send(data)
                break
            while self.socket.poll(0):
                self.socket.recv()
            since = perf_counter()


def run_steps(
    executor: Executor, config: RankConfig, cpus: list[int], plans: list[Plan], clock: KernelClock
) -> list[StepTime]:
    """One round, in this process. cpus: all those of the stage, none if it is not pinned."""
    role = StageRole(
        rank=0,
        ranks=Ranks(num_stages=1),
        epoch=config.epoch,
        window=config.window,
        max_rows=config.max_num_seqs,
        blocking_feedback=False,
    )
    own = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder, zmq.Context() as context:
        if cpus:
            # OpenMP has pinned this thread, and would thereby confine to its core those of the
            # sockets, which begin now.
            os.sched_setaffinity(0, cpus)
        address = f"ipc://{folder}/stage"
        control = ControlSocket(address, context)
        with context.socket(zmq.DEALER) as socket:
            socket.set_hwm(0)
            socket.connect(address)
            os.sched_setaffinity(0, own)
            stand = _Stand(socket, clock, [*plans, Stop(config.epoch)], config.window)
            loop = stand.watch(stage_loop(role, executor))
            timeline = RankTimeline(config.epoch, config.rank)
            drive(loop, control, {}, timeline, config.link_timeout)
            control.close()
    return stand.times


def _run() -> None:
    """In the process: the task comes on standard input, the times go to standard output."""
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    with torch.inference_mode():
        executor = load_executor(task.config, task.num_blocks)
        gc.collect()
        gc.freeze()
        assert isinstance(executor, ModelExecutor)
        assert isinstance(executor.model, Interpreter)
        with timed_kernels(executor.model) as clock:
            rounds = [
                run_steps(executor, task.config, task.cpus, task.plans, clock)
                for _ in range(task.rounds + 1)
            ]
    sys.stdout.buffer.write(msgspec.msgpack.encode(rounds[1:]))


if __name__ == "__main__":
    _run()
