"""Greedy decoding through real stage loops on virtual links, without any process."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.checkpoint.locate import locate_model
from headrace.deployment.partition import stage_shares
from headrace.engine.limits import SchedulerConfig
from headrace.engine.prepared import stage_sampling
from headrace.engine.request import Request, Sequence
from headrace.engine.scheduler import Scheduler
from headrace.execution.model_executor import ModelExecutor
from headrace.protocol.messages import Result
from headrace.protocol.plan import Plan
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams
from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork
from headrace.simulation.virtual_stages import VirtualStages
from stage_models import load_shards, read_model


@dataclass
class _Recorder(ModelExecutor):
    """An executor that keeps the logits it sampled from."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def sample(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits)
        return super().sample(plan, logits)


def run_stages(
    path: Path,
    layers: list[int],
    prompt: list[int],
    outputs: int,
    chunk: int,
    shards: int = 1,
    *,
    stored: bool = False,
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits they came from, through real stage loops on virtual links.

    shards: of each stage, which add up in threads of this process. stored: quantized weights stay
    as they are.
    """
    files = locate_model(str(path))
    model = read_model(files)
    executors = []
    for share in stage_shares(layers):
        stage = load_shards(files, model, share, shards, stored=stored)
        executors.append(_Recorder(stage, 2, 40, 4, 32, torch.device("cpu")))
    greedy = SamplingParams(temperature=0, max_tokens=outputs)
    sampling = stage_sampling(greedy, seed=0)
    sequence = Sequence(Request(0, prompt, greedy, outputs), 0, sampling)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=chunk,
            block_size=4,
            num_blocks=40,
            num_microbatches=2,
            window=4,
            eos_token_ids=frozenset(),
            prefix_caching=True,
            prefill_policy="budget",
        )
    )
    scheduler.add(sequence)
    clock = VirtualClock()
    with torch.inference_mode():
        network = VirtualNetwork(clock, Ranks(len(executors)))
        stages = VirtualStages(clock, network, list(executors), window=4, max_rows=2)
        while not scheduler.idle:
            while (plan := scheduler.plan()) is not None:
                stages.send(plan)
            for message in stages.receive(1.0):
                if isinstance(message, Result):
                    scheduler.take_result(message)
        stages.stop()
    return sequence.outputs, torch.cat(executors[-1].seen)
