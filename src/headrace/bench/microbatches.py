"""Does the number of microbatches that the engine chooses do as well as the best fixed one?

In virtual time, since trying them all would take days: the engine, its scheduler and the stage
loops are the real ones, the stages and links take what they are told to.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from headrace.checkpoint.locate import SYNTHETIC
from headrace.config import EngineConfig
from headrace.deployment.virtual import VirtualEngine, launch_virtual
from headrace.sampling_params import SamplingParams

_PROMPT_LEN = 8
# Output tokens of each request, and the part of them between whose ends the rate is taken: all
# requests decode then. Auto gets more, of which the first half is for finding its number.
_FIXED_LEN, _AUTO_LEN = 16, 96
_FIXED_PART, _AUTO_PART = (1 / 3, 5 / 6), (1 / 2, 11 / 12)


@dataclass(frozen=True)
class Case:
    """stage_ms: FIXED+PER_ROW. latency_ms: one way."""

    pp: int
    stage_ms: str
    requests: int
    latency_ms: float


@dataclass(frozen=True)
class Comparison:
    """Output tokens a second while all requests decode, for auto once it had time to settle."""

    case: Case
    best_fixed: int
    best_per_s: float
    auto: int
    auto_per_s: float
    pp_per_s: float

    def as_json(self) -> dict[str, Any]:
        """The case, the figures, and auto and m = pp over the best."""
        return {
            **asdict(self.case),
            "best_fixed": self.best_fixed,
            "best_per_s": self.best_per_s,
            "auto": self.auto,
            "auto_per_s": self.auto_per_s,
            "auto_over_best": self.auto_per_s / self.best_per_s,
            "pp_per_s": self.pp_per_s,
            "pp_over_best": self.pp_per_s / self.best_per_s,
        }


def cases(
    pps: Iterable[int],
    stage_ms: Iterable[str],
    requests: Iterable[int],
    latency_ms: Iterable[float],
) -> Iterator[Case]:
    """Every combination."""
    for pp, times, latency, count in product(pps, stage_ms, latency_ms, requests):
        yield Case(pp, times, count, latency)


def compare(case: Case) -> Comparison:
    """Auto, and every fixed number of microbatches: all up to 16, from there on every second, from
    32 on every fourth, between which nothing changes."""
    # With such small tensors a second thread is only waited for.
    torch.set_num_threads(1)
    auto = _launch(case, None)
    auto_per_s = _rate(auto, case, _AUTO_LEN, _AUTO_PART)
    most = auto.deployment.most_microbatches
    fixed = {
        count: _rate(_launch(case, count), case, _FIXED_LEN, _FIXED_PART)
        for count in (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4))
        if count <= most
    }
    best = max(fixed, key=lambda count: fixed[count])
    return Comparison(
        case,
        best,
        fixed[best],
        auto.engine.snapshot.num_microbatches,
        auto_per_s,
        fixed[min(case.pp, most)],
    )


def _config(case: Case, count: int | None) -> EngineConfig:
    return EngineConfig(
        model=SYNTHETIC + case.stage_ms,
        pipeline_parallel_size=case.pp,
        max_num_seqs=case.requests,
        max_model_len=_PROMPT_LEN + _AUTO_LEN,
        max_num_batched_tokens=max(512, case.requests),
        enable_prefix_caching=False,
        num_microbatches=count,
        link_latency_ms=case.latency_ms,
        stall_timeout=3600.0,
    )


def _launch(case: Case, count: int | None) -> VirtualEngine:
    return launch_virtual(_config(case, count))


def _rate(running: VirtualEngine, case: Case, length: int, part: tuple[float, float]) -> float:
    """Tokens a second between the moments when two parts of all tokens were out."""
    engine = running.engine
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    for number in range(case.requests):
        engine.add([number % engine.vocab_size] * _PROMPT_LEN, params)
    total = case.requests * length
    first, last = (total * share for share in part)
    tokens, began = 0, (0, 0.0)
    while tokens < last:
        tokens += len(engine.step())
        if not began[0] and tokens >= first:
            began = tokens, running.clock.now
    return (tokens - began[0]) / (running.clock.now - began[1])
