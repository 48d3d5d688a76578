"""The long load: one long prompt among running streams and short prompts that keep coming."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.bench.figures import Setting
from headrace.bench.mixed_load import LoadRequest
from headrace.engine.prefill_order import FirstCome, PrefillOrder, ShortestFirst

_STREAMS = 4
_STREAM_PROMPT = 16
_SHORT_PROMPT, _SHORT_OUTPUT = 5, 2
_LONG_OUTPUT = 2
# The streams have a token each by then, and the engine has measured its steps.
_LONG_ARRIVES_S = 2.0
_SHORT_EVERY_S = 1.0
_STEP_TOKENS = 512


@dataclass(frozen=True)
class Contender:
    """An order of prefill and the policy that it comes with."""

    name: str
    setting: Setting

    def order(self) -> PrefillOrder:
        """The order, at its start."""
        return FirstCome() if self.name == "first come" else ShortestFirst()


CONTENDERS = (
    # vLLM's: who has begun goes on, and every step is filled.
    Contender("first come", Setting("budget", _STEP_TOKENS)),
    Contender("shortest first", Setting("even", _STEP_TOKENS)),
)


@dataclass(frozen=True)
class LongLoad:
    """max_positions: of the longest request. short_prompts: how many, a second apart."""

    max_positions: int
    short_prompts: int

    def requests(self) -> list[LoadRequest]:
        """In order of arrival: the streams, the long prompt, the short ones."""
        output = self.max_positions - _STREAM_PROMPT
        long = LoadRequest(_LONG_ARRIVES_S, self.max_positions - _LONG_OUTPUT, _LONG_OUTPUT)
        streams = [LoadRequest(0.0, _STREAM_PROMPT, output)] * _STREAMS
        shorts = [
            LoadRequest(_LONG_ARRIVES_S + n * _SHORT_EVERY_S, _SHORT_PROMPT, _SHORT_OUTPUT)
            for n in range(1, self.short_prompts + 1)
        ]
        return [*streams, long, *shorts]

    @property
    def measured(self) -> range:
        """The requests, by their place, with which the measurement ends: all but the streams."""
        return range(_STREAMS, _STREAMS + 1 + self.short_prompts)

    def figures(self, contender: Contender, tokens_at: Mapping[int, Items[float]]) -> "LongFigures":
        """Summed up. tokens_at: when each request's tokens came, since the start of the load."""
        requests = self.requests()
        first = {n: tokens_at[n][0] for n in self.measured}
        waits = {n: at - requests[n].arrival_s for n, at in first.items()}
        began, ended = _LONG_ARRIVES_S, first[_STREAMS]
        before, beside = [0.0], [0.0]
        for stream in range(_STREAMS):
            for earlier, later in pairwise(tokens_at[stream]):
                if later <= began:
                    before.append(later - earlier)
                elif earlier < ended:
                    beside.append(later - earlier)
        short = [waits[n] for n in self.measured[1:]]
        return LongFigures(
            order=contender.name,
            prefill_policy=contender.setting.prefill_policy,
            long_ttft_s=waits[_STREAMS],
            short_ttft_p50_s=float(np.median(short)),
            short_ttft_max_s=max(short),
            stream_gap_before_p50_s=float(np.median(before[1:] or before)),
            stream_gap_beside_p50_s=float(np.median(beside[1:] or beside)),
            stream_gap_beside_max_s=max(beside),
        )

    def as_json(self, results: Items["LongFigures"]) -> dict[str, Any]:
        """All figures, and the long prompt's time over that of the first of the results."""
        return {
            "workload": "long",
            "streams": _STREAMS,
            "long_prompt": self.max_positions - _LONG_OUTPUT,
            "short_prompt": _SHORT_PROMPT,
            "requests": self.short_prompts,
            "max_num_batched_tokens": _STEP_TOKENS,
            "orders": [
                asdict(figures) | {"long_ttft_ratio": figures.long_ttft_s / results[0].long_ttft_s}
                for figures in results
            ],
        }


@dataclass(frozen=True)
class LongFigures:
    """How it went under one order, in seconds.

    ttft: from arrival to first token. stream_gap: between two tokens of a running stream, before
    the long prompt came and while it was prefilled.
    """

    order: str
    prefill_policy: str
    long_ttft_s: float
    short_ttft_p50_s: float
    short_ttft_max_s: float
    stream_gap_before_p50_s: float
    stream_gap_beside_p50_s: float
    stream_gap_beside_max_s: float
