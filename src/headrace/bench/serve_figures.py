"""Figures of a load on a server, with the names and meanings that vLLM's tool gives them."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

_PERCENTILES = (90, 99)


@dataclass(frozen=True)
class Timing:
    """One answer, streamed to its end.

    began: just before the request was sent, seconds on a clock. chunk_times: when each chunk with
    a token came, on the same clock, at least one. Tokens are as the server counts them.
    """

    began: float
    chunk_times: list[float]
    input_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunk_times[0] - self.began

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.chunk_times[-1] - self.began


@dataclass(frozen=True)
class LoadRun:
    """What came of a load. errors: of each request that failed. duration: seconds from the first
    request to the last answer's end. server_cpu, client_cpu: seconds of processor time meanwhile,
    the server's if it tells."""

    timings: list[Timing]
    errors: list[str]
    duration: float
    peak_concurrency: int
    server_cpu: float | None
    client_cpu: float

    def as_json(self) -> dict[str, Any]:
        """The figures; throughput is a second's, CPU time that of an output token.

        ttft: time to first token. tpot: the rest of an answer's time over the rest of its tokens,
        an answer each. itl: between two chunks, all answers' together. e2el: of whole answers.
        server_cpu_ms_per_token: of the process that answers /metrics; its stages are not in it.
        """
        timings = self.timings
        input_tokens = sum(t.input_tokens for t in timings)
        output_tokens = sum(t.output_tokens for t in timings)
        figures: dict[str, Any] = {
            "completed": len(timings),
            "failed": len(self.errors),
            "duration": self.duration,
            "total_input_tokens": input_tokens,
            "total_output_tokens": output_tokens,
            "request_throughput": len(timings) / self.duration,
            "output_throughput": output_tokens / self.duration,
            "total_token_throughput": (input_tokens + output_tokens) / self.duration,
            "max_concurrent_requests": self.peak_concurrency,
            **_spread("ttft", [t.ttft for t in timings]),
            **_spread("tpot", [
                (t.e2el - t.ttft) / (t.output_tokens - 1) for t in timings if t.output_tokens > 1
            ]),
            **_spread("itl", [
                b - a for t in timings for a, b in itertools.pairwise(t.chunk_times)
            ]),
            **_spread("e2el", [t.e2el for t in timings]),
        }  # fmt: skip
        if output_tokens:
            if self.server_cpu is not None:
                figures["server_cpu_ms_per_token"] = self.server_cpu * 1e3 / output_tokens
            figures["client_cpu_ms_per_token"] = self.client_cpu * 1e3 / output_tokens
        if self.errors:
            figures["first_error"] = self.errors[0]
        return figures


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    """Mean, median and percentiles in milliseconds; nothing if there is nothing."""
    if not seconds:
        return {}
    return {
        f"mean_{name}_ms": float(np.mean(seconds)) * 1e3,
        f"median_{name}_ms": float(np.median(seconds)) * 1e3,
        **{f"p{p}_{name}_ms": float(np.percentile(seconds, p)) * 1e3 for p in _PERCENTILES},
    }
