"""What an engine can be told, with vLLM's names where vLLM has them."""

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from headrace.checks import check_type, unknown_name
from headrace.engine.microbatch_count import MOST_MICROBATCHES, window_of
from headrace.engine.prefill_policy import PrefillPolicyName
from headrace.errors import UsageError
from headrace.protocol.messages import LinkEmulation
from headrace.sampling_params import MAX_SEED

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. Raises UsageError naming the flag for values out of range.

    model: a GGUF file, a Hugging Face directory or the name of a packaged model (smollm2).
    dtype: of weights, activations and cache; auto is bfloat16 where the cores multiply it and the
        checkpoint is not float32, else float32.
    pipeline_parallel_size: number of stages. layer_partition: layers per stage such as "19,11";
        None splits by cost.
    max_model_len: positions a sequence may have; None takes the model's own limit.
    max_num_seqs: sequences that run at the same time; None for 256, or fewer if
        max_num_batched_tokens is less.
    max_num_batched_tokens: tokens in one step.
    scheduling_policy: fcfs runs requests as they come; priority lets them have a priority.
    prefill_policy: even gives consecutive steps the same cost; budget fills every step up to
        max_num_batched_tokens.
    max_itl_ms: how long prompts that are read may make a running sequence wait for its next token,
        by what the engine has learned of its steps' cost; None lets `even` choose: nine times as
        long as without any prompt.
    block_size: positions in a KV-cache block. enable_prefix_caching: keep blocks of requests that
        ended, for others that begin with the same tokens.
    kv_cache_memory: cache a stage, in bytes or as a text such as 2GiB; None for what
        gpu_memory_utilization says, the part of the memory free once the weights are loaded that
        the caches of all stages may take.
    max_logprobs: log-probabilities of one position that a request may ask for; -1 for no limit.
    token_feedback: deferred, or blocking (for measuring).
    num_microbatches: groups of sequences that take turns; None for as many as pay, chosen while
        running.
    link_latency_ms, link_bandwidth_mbps: emulate links that take so long for a message, one way,
        and for so many megabits a second; for measuring.
    cpu_threads: OpenMP threads of each stage; None for one on each of its cores. cpu_bind: auto for
        disjoint cores, each thread pinned to one; none to pin nothing; or each stage's cores such
        as "0-3|4-7".
    generation_config: auto takes what generation_config.json or a GGUF file's general.sampling
        recommends for what requests leave out; none, or vLLM's word vllm, does not.
    seed: base of the random numbers of requests without a seed.
    master_addr, master_port: where stages meet; port 0 picks a free one.
    stall_timeout: seconds in which nothing comes from the stages, and none computes, that end in an
        error.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    pipeline_parallel_size: int = 1
    layer_partition: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 512
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    prefill_policy: PrefillPolicyName = "even"
    max_itl_ms: float | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.5
    max_logprobs: int = 20
    token_feedback: Literal["deferred", "blocking"] = "deferred"
    num_microbatches: int | None = None
    link_latency_ms: float = 0.0
    link_bandwidth_mbps: float | None = None
    cpu_threads: int | None = None
    cpu_bind: str = "auto"
    generation_config: Literal["auto", "none", "vllm"] = "auto"
    seed: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    stall_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(EngineConfig).items():
            check_type(name, getattr(self, name), kind)
        for name in (
            "pipeline_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
            "block_size", "num_microbatches", "cpu_threads",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} must be at least 1, not {value}")
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise UsageError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: each decoding sequence takes one token a step"
            )
        if (self.num_microbatches or 0) > self.sequences:
            raise UsageError(
                f"--num-microbatches {self.num_microbatches} is more than the {self.sequences} "
                "sequences of --max-num-seqs: some would always be empty"
            )
        if not 0 <= self.link_latency_ms <= 60_000:
            raise UsageError(
                f"--link-latency-ms must be from 0 to 60000, not {self.link_latency_ms}"
            )
        if self.link_bandwidth_mbps is not None and not self.link_bandwidth_mbps > 0:
            raise UsageError(
                f"--link-bandwidth-mbps must be above 0, not {self.link_bandwidth_mbps}"
            )
        if self.max_itl_ms is not None and not 0 < self.max_itl_ms < math.inf:
            raise UsageError(f"--max-itl-ms must be above 0, not {self.max_itl_ms}")
        if self.max_logprobs < -1:
            raise UsageError(f"--max-logprobs must be at least -1, not {self.max_logprobs}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise UsageError("--kv-cache-memory must be at least 1 byte")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise UsageError(
                "--gpu-memory-utilization must be above 0 and at most 1, not "
                f"{self.gpu_memory_utilization}"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"--seed must be from 0 to {MAX_SEED}, not {self.seed}")
        if not 0 <= self.master_port <= 65535:
            raise UsageError(f"--master-port must be from 0 to 65535, not {self.master_port}")
        if not 0 < self.stall_timeout <= 86_400:
            raise UsageError(
                f"--stall-timeout must be above 0 and at most 86400, not {self.stall_timeout}"
            )

    @classmethod
    def of(cls, user: str, model: str, settings: dict[str, Any]) -> "EngineConfig":
        """The config of keyword arguments given to `user`; UsageError for one there is not."""
        known = {field.name for field in fields(cls)}
        for name in settings:
            if name not in known:
                raise unknown_name(user, "setting", name, known)
        return cls(model=model, **settings)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of cache a stage, if they are given. UsageError if they are no size."""
        if not isinstance(self.kv_cache_memory, str):
            return self.kv_cache_memory
        size = parse_size(self.kv_cache_memory)
        if size is None:
            raise UsageError(
                f"--kv-cache-memory {self.kv_cache_memory!r} is not a size such as 2GiB or 500MB"
            )
        return size

    @property
    def sequences(self) -> int:
        """Sequences that may run at the same time."""
        return self.max_num_seqs or min(256, self.max_num_batched_tokens)

    @property
    def microbatches(self) -> int:
        """Groups of sequences that take turns, at the start."""
        return self.num_microbatches or min(self.pipeline_parallel_size, self.sequences)

    @property
    def most_microbatches(self) -> int:
        """Groups that there may ever be."""
        if self.pipeline_parallel_size == 1:
            return self.microbatches
        return self.num_microbatches or min(MOST_MICROBATCHES, self.sequences)

    @property
    def window(self) -> int:
        """The most steps that may ever be planned beyond the newest result."""
        return window_of(self.most_microbatches, self.pipeline_parallel_size)

    @property
    def link_emulation(self) -> LinkEmulation | None:
        """How slow links are to be, if they are to be slower than they are."""
        if not self.link_latency_ms and self.link_bandwidth_mbps is None:
            return None
        mbps = self.link_bandwidth_mbps
        return LinkEmulation(self.link_latency_ms / 1e3, None if mbps is None else mbps * 1e6 / 8)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int | None:
    """Bytes of a size such as 2GiB, 500MB or 1000000; None if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    return int(float(match[1]) * _UNITS[match[2] or ""]) if match else None
