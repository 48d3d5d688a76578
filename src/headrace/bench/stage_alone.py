"""One stage's share of a model with nothing else running: the same plans, and what they take.

The stage gets a process of its own, on the cores and with the threads that it has in the pipeline.
"""

import sys
import time
from collections.abc import Iterable

import msgspec
import torch

from headrace.execution.executor import Executor
from headrace.execution.load import load_model, stage_executor
from headrace.host.alone import answer_alone
from headrace.host.cpus import StageCpus
from headrace.kernels.path import choose_path
from headrace.protocol.messages import RankConfig
from headrace.protocol.plan import Plan, samples, token_count


class _Task(msgspec.Struct, array_like=True):
    """What the process is to do. warm_up: plans whose time does not count."""

    config: RankConfig
    num_blocks: int
    warm_up: list[Plan]
    plans: list[Plan]


def seconds_alone(
    config: RankConfig,
    cpus: StageCpus,
    num_blocks: int,
    warm_up: list[Plan],
    plans: list[Plan],
) -> list[float]:
    """Seconds of model and sampler for each of the plans with rows, in order.

    Both lists are complete runs: they begin and end without a sequence on the stage. warm_up comes
    first and is not counted. Raises PipelineError if the process fails.
    """
    task = msgspec.msgpack.encode(_Task(config, num_blocks, warm_up, plans))
    answer = answer_alone(__name__, f"stage {config.rank} alone", cpus, task)
    return msgspec.msgpack.decode(answer, type=list[float])


def replay(executor: Executor, config: RankConfig, plans: Iterable[Plan]) -> list[float]:
    """Run the plans as the stage does, with inputs at random: seconds of each that has rows.

    Which token a reference means does not matter for the time.
    """
    seconds = []
    for plan in plans:
        executor.begin(plan)
        if plan.rows:
            inputs = _inputs(config, token_count(plan))
            began = time.monotonic()
            _compute(executor, config, plan, inputs)
            seconds.append(time.monotonic() - began)
        executor.end(plan)
    return seconds


def _compute(executor: Executor, config: RankConfig, plan: Plan, inputs: torch.Tensor) -> None:
    activations = executor.forward(plan, inputs)
    logits = tokens = None
    last = config.stage == config.ranks.num_stages - 1
    if last and samples(plan):
        logits = executor.logits(plan, activations)
    executor.synchronize()
    if not last:
        return
    if logits is not None:
        tokens = executor.sample(plan, logits)
    executor.logprobs(plan, activations, logits, tokens)


def _inputs(config: RankConfig, tokens: int) -> torch.Tensor:
    """Ids int64 [tokens] on the first stage, else activations [tokens, hidden]."""
    model = config.program
    if config.stage == 0:
        return torch.randint(model.vocab_size, (tokens,))
    return torch.randn(tokens, model.hidden_size).to(getattr(torch, config.dtype))


def load_executor(config: RankConfig, num_blocks: int) -> Executor:
    """The stage's share of the model with its cache and its kernels, as in the pipeline."""
    choose_path()
    device = torch.device("cpu")
    return stage_executor(config, load_model(config, device, lambda _: None), num_blocks, device)


def _run() -> None:
    """In the process: the task comes on standard input, the seconds go to standard output."""
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    with torch.inference_mode():
        executor = load_executor(task.config, task.num_blocks)
        replay(executor, task.config, task.warm_up)
        seconds = replay(executor, task.config, task.plans)
    sys.stdout.buffer.write(msgspec.msgpack.encode(seconds))


if __name__ == "__main__":
    _run()
