"""Whole pipelines in one process, in many orders of events."""

import os
import random

import pytest
import torch

from headrace.engine.request import Sequence
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.pipeline.executor import ModelExecutor
from headrace.pipeline.partition import stage_shares
from headrace.protocol.sampling_params import SamplingParams, resolve
from simulator import Simulation
from toy_model import VOCAB, ToyModel, expected_outputs, toy_config

MAX_MODEL_LEN = 48
# For each number of stages and feedback mode; raise it by the environment for a long search.
SEEDS = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", "40"))


def build(seed: int, num_stages: int, blocking: bool = False) -> Simulation:
    """A random load on a random engine; the seed decides everything."""
    rng = random.Random(seed)
    microbatches = rng.randint(1, num_stages + 2)
    window = microbatches + rng.randint(1, 3)
    block_size = rng.choice([1, 2, 4, 16])
    max_num_seqs = rng.randint(1, 5)
    # From barely enough for one sequence, so that others are preempted all the time, to plenty.
    num_blocks = int(-(-MAX_MODEL_LEN // block_size) * rng.choice([1, 1, 1.5, 2, 4]))
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([1, 3, 8, 64])),
        block_size=block_size,
        num_blocks=num_blocks,
        num_microbatches=microbatches,
        window=window,
        # A few tokens end a sequence, so stops come at unforeseen moments.
        eos_token_ids=frozenset(rng.sample(range(VOCAB), 3)),
        prefix_caching=rng.random() < 0.7,
        prefill_policy=rng.choice(["even", "budget"]),
    )
    shares = stage_shares([rng.randint(1, 2) for _ in range(num_stages)])
    executors = [
        ModelExecutor(
            model=ToyModel(toy_config(shares[-1].end_layer), share),
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks=-(-MAX_MODEL_LEN // block_size),
            device=torch.device("cpu"),
        )
        for share in shares
    ]
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    sequences = []
    for number in range(rng.randint(1, 8)):
        prompt = shared[: rng.randint(0, 20)] if rng.random() < 0.6 else []
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(not prompt, 8))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randint(1, 20),
            ignore_eos=rng.random() < 0.5,
        )
        eos = config.eos_token_ids
        sampling = resolve(params, seed=seed + number, eos_token_ids=eos, bad_words=[])
        assert params.max_tokens is not None
        sequences.append(
            Sequence(
                number, 0, prompt, params, sampling, params.max_tokens, rng.choice([0, 0, 0, 1])
            )
        )
    return Simulation(
        seed=seed,
        scheduler=Scheduler(config),
        executors=list(executors),
        window=window,
        max_rows=max_num_seqs,
        arrivals=sequences,
        aborts=[s for s in sequences if rng.random() < 0.25],
        blocking_feedback=blocking,
    )


def check(simulation: Simulation) -> None:
    """Every sequence holds exactly the tokens that it would have had alone."""
    scheduler = simulation.scheduler
    config = scheduler.config
    num_layers = simulation.executors[-1].model.share.end_layer  # type: ignore[attr-defined]
    for sequence in simulation.arrivals:
        expected, reason = expected_outputs(
            sequence.prompt,
            num_layers,
            sequence.params,
            sequence.sampling.seed,
            config.eos_token_ids,
        )
        if sequence.finish_reason == "abort":
            assert sequence in simulation.aborts
            expected = expected[: len(sequence.outputs)]
        else:
            assert sequence.finish_reason == reason, f"seed {simulation.seed}"
        assert sequence.outputs == expected, f"seed {simulation.seed}"
    assert scheduler.free_blocks == scheduler._pool.num_blocks, "blocks leaked"


@pytest.mark.parametrize("blocking", [False, True], ids=["deferred", "blocking"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_any_order_of_events_gives_each_sequence_its_own_tokens(
    num_stages: int, blocking: bool
) -> None:
    for seed in range(SEEDS):
        simulation = build(seed, num_stages, blocking)
        simulation.run()
        check(simulation)


def test_a_sequence_waits_for_nothing_once_the_engine_has_its_token() -> None:
    """References name only steps whose result the engine does not have (contract 1, point 3)."""
    simulation = build(3, 2)
    simulation.run()
    for plan in simulation.plans:
        for row in plan.rows:
            for token in row.inputs:
                if not isinstance(token, int):
                    assert 0 < plan.step - token.step < simulation.window


def test_the_same_seed_replays_the_same_plans() -> None:
    first, second = build(11, 3), build(11, 3)
    first.run()
    second.run()
    assert first.plans == second.plans
