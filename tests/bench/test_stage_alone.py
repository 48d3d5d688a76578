import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.stage_alone import load_executor, replay, seconds_alone
from headrace.checkpoint.gguf_file import read_gguf
from headrace.deployment.partition import stage_shares
from headrace.engine.limits import SchedulerConfig
from headrace.engine.request import Request, Sequence
from headrace.engine.scheduler import Scheduler
from headrace.errors import PipelineError
from headrace.host.cpus import StageCpus
from headrace.model.read import model_from_gguf
from headrace.protocol.messages import RankConfig, Result
from headrace.protocol.plan import Plan, Sampling, Yield, token_count
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import SamplingParams
from tiny_checkpoints import write_tiny_gguf

BLOCKS, BLOCK_SIZE, SEQUENCES, POSITIONS = 12, 8, 4, 32


def complete_plans(requests: int = 6) -> list[Plan]:
    """Of a whole run: chunks, references, slots and blocks used again, a plan for releases."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=POSITIONS,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=16,
            block_size=BLOCK_SIZE,
            num_blocks=BLOCKS,
            num_microbatches=2,
            window=4,
            eos_token_ids=frozenset(),
            prefix_caching=False,
            prefill_policy="even",
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=5)
    for number in range(requests):
        prompt = [number + 1] * (7 + 3 * number)
        request = Request(number, prompt, params, 5)
        scheduler.add(Sequence(request, 0, Sampling(seed=0, temperature=0.0)))
    plans, in_flight = [], deque[Plan]()
    while not scheduler.idle:
        while (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
        plan = in_flight.popleft()
        plans.append(plan)
        tokens = [[1] if row.yields & Yield.TOKEN else [] for row in plan.rows]
        scheduler.take_result(Result(plan.epoch, plan.step, tokens, []))
    return plans


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def rank_config(checkpoint: Path, stage: int) -> RankConfig:
    share = stage_shares([2, 2])[stage]
    return RankConfig(
        epoch=0,
        rank=stage,
        ranks=Ranks(2),
        share=share,
        model_path=str(checkpoint),
        model_kind="gguf",
        program=model_from_gguf(read_gguf(checkpoint)).program(share),
        synthetic=None,
        dtype="float32",
        weights="dequantized",
        max_model_len=POSITIONS,
        max_num_seqs=SEQUENCES,
        block_size=BLOCK_SIZE,
        window=4,
        blocking_feedback=False,
        start_timeout=60.0,
        link_timeout=60.0,
        link_backend="local",
        link_emulation=None,
        master_addr="127.0.0.1",
        master_port=0,
        store_fd=None,
        host_links=None,
    )


@dataclass
class Spy:
    """Counts what a stage is asked for, and hands it on. tokens: inputs of each forward."""

    executor: Any
    calls: Counter[str] = field(default_factory=Counter)
    tokens: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.executor, name)

    def forward(self, plan: Plan, inputs: torch.Tensor) -> Any:
        self.tokens.append(len(inputs))
        return self.executor.forward(plan, inputs)


@pytest.mark.parametrize("stage", [0, 1])
def test_every_plan_is_replayed_and_leaves_the_stage_as_empty_as_it_was(
    checkpoint: Path, stage: int
) -> None:
    plans = complete_plans()
    config = rank_config(checkpoint, stage)
    with_rows = [plan for plan in plans if plan.rows]
    sampling = [p for p in with_rows if any(row.yields & Yield.TOKEN for row in p.rows)]
    assert len(sampling) < len(with_rows) < len(plans), "all kinds of plans are there"
    with torch.inference_mode():
        spy = Spy(load_executor(config, BLOCKS))
        # Twice: the second run would find a slot that the first one left taken.
        for _ in range(2):
            seconds = replay(spy, config, plans)
            assert len(seconds) == len(with_rows)
            assert all(s > 0 for s in seconds)
    assert spy.tokens == [token_count(plan) for plan in with_rows] * 2
    expected = {
        "begin": 2 * len(plans),
        "end": 2 * len(plans),
        "synchronize": 2 * len(with_rows),
    }
    if stage == 1:
        expected |= {
            "logits": 2 * len(sampling),
            "sample": 2 * len(sampling),
            "logprobs": 2 * len(with_rows),
        }
    assert spy.calls == expected


def test_a_process_that_fails_says_why(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho one >&2\necho no memory >&2\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(PipelineError, match="stage 1 alone failed: no memory"):
        seconds_alone(
            rank_config(checkpoint, 1),
            StageCpus(cpus=[], threads=1),
            BLOCKS,
            [],
            complete_plans(1),
        )
