"""Messages around the plans: how a stage is set up, what it answers, how it ends."""

from typing import Literal

import msgspec

from headrace.protocol.model_config import StageShare
from headrace.protocol.plan import Plan
from headrace.protocol.program import Program
from headrace.protocol.ranks import Ranks


class LinkEmulation(msgspec.Struct, array_like=True, frozen=True):
    """Links that are slower than they are: each message takes latency_s, and its size over
    bytes_per_s (None: no time at all)."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None


class SyntheticTime(msgspec.Struct, array_like=True, frozen=True):
    """What a synthetic stage takes for a step, in seconds: fixed_s, and per_row_s a row."""

    fixed_s: float
    per_row_s: float


# What carries tensors from rank to rank: links of Headrace's own on one host, or torch.distributed.
LinkBackend = Literal["local", "gloo"]


class HostLinks(msgspec.Struct, array_like=True, frozen=True):
    """How ranks on different hosts meet. nodes: by rank, the number of its host. address: of this
    rank's host, as others reach it. secret: of this run, from which the edges' keys derive.
    encrypted: or only authenticated."""

    nodes: list[int]
    address: str
    secret: bytes
    encrypted: bool


class RankConfig(msgspec.Struct, tag="rank_config", array_like=True, frozen=True, kw_only=True):
    """First message to a stage: which part of which model it runs and how.

    rank: which of the ranks it is. share: for people; the program says what to run. model_path and
    model_kind say where the weights are, on another host as soon as its agent has put in the path
    there; dtype is the name of a torch dtype. weights: whether quantized ones stay as they are.
    synthetic: run no model, only take this time. window: the most steps that the engine may plan
    beyond the newest result. master_addr and master_port are those of torch.distributed's store, if
    it carries tensors; store_fd is its listening socket, inherited by the first stage alone.
    host_links: None where all ranks are on one host. start_timeout and link_timeout, in seconds,
    bound the wait for the others to come, and for one of their messages.
    """

    epoch: int
    rank: int
    ranks: Ranks
    share: StageShare
    model_path: str
    model_kind: Literal["gguf", "huggingface", "synthetic"]
    program: Program
    synthetic: SyntheticTime | None
    dtype: str
    weights: Literal["stored", "dequantized"]
    max_model_len: int
    max_num_seqs: int
    block_size: int
    window: int
    blocking_feedback: bool
    start_timeout: float
    link_timeout: float
    link_backend: LinkBackend
    link_emulation: LinkEmulation | None
    master_addr: str
    master_port: int
    store_fd: int | None
    host_links: HostLinks | None

    @property
    def stage(self) -> int:
        """The stage that this rank belongs to."""
        return self.ranks.stage_of(self.rank)


class EdgeAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where the rank at the end of an edge listens for the one at its beginning.

    tensors, source, target: the edge, what it carries from which rank to which. address: a path on
    one host, else where it listens on the network. token: what the one who connects must show, on
    one host; between hosts it shows a key.
    """

    tensors: str
    source: int
    target: int
    address: str
    token: str


class CacheConfig(msgspec.Struct, tag="cache_config", array_like=True, frozen=True):
    """Second message to a rank: how many KV-cache blocks it allocates, and whom it sends to.

    peers: where the edges that go out from it end, with links of Headrace's own.
    """

    num_blocks: int
    peers: list[EdgeAddress]


class NewEpoch(msgspec.Struct, tag="new_epoch", array_like=True, frozen=True):
    """To a rank that lives on when the pipeline is built anew: the epoch before is over.

    Weights and the cache's memory stay. Links, plans and everything about sequences are void; the
    next message from the rank that counts is Loaded.
    """

    epoch: int


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Last message of an epoch: finish the plans held, drain the links, exit."""

    epoch: int


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """A stage's progress while it starts; fraction is from 0 to 1, of what is said of it in the
    end."""

    rank: int
    phase: Literal["weights received", "weights loaded"]
    fraction: float


class Loaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """A stage holds its weights and says what they and a cache block take, in bytes.

    kernels: the path that its kernels take. note: what the user should know about it, or None.
    listening: where it waits for those that send to it, with links of Headrace's own.
    """

    epoch: int
    rank: int
    weight_bytes: int
    cache_bytes_per_block: int
    kernels: str
    note: str | None
    listening: list[EdgeAddress]


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """A stage has its cache and its links, and waits for plans."""

    epoch: int
    rank: int


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities at one position, of the model's own distribution (natural logarithm).

    ids: the token that is there, then the likeliest tokens, best first (it may be among them).
    logprobs: theirs, in the same order. rank: the token's own place among all, from 1.
    """

    ids: list[int]
    logprobs: list[float]
    rank: int


class RowLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """What a row reports besides its token. sampled: of that token. prompt: of prompt tokens."""

    row: int
    sampled: TokenLogprobs | None
    prompt: list[TokenLogprobs]


class Result(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Last stage to engine: the tokens that each row of the step sampled (none or one each).

    logprobs: one entry for each row that was asked for some, in row order.
    """

    epoch: int
    step: int
    tokens: list[list[int]]
    logprobs: list[RowLogprobs]


class Report(msgspec.Struct, tag="report", array_like=True, frozen=True):
    """Any stage to engine after a step: where the time went, in seconds of its own clock.

    Reports influence speed and health, never tokens. began is the moment the stage had the plan,
    ended the moment it was done with the step. sent_at: when it started to send what the step
    gives to another stage, activations or on the last stage feedback; None if it gives nothing.
    arrivals: the moments at which transfers that it received and waited for since the last report
    were there, by step (activations; on the first stage feedback), as far as they are known.
    """

    epoch: int
    step: int
    rank: int
    began: float
    ended: float
    plan_wait_s: float
    feedback_wait_s: float
    activation_wait_s: float
    send_wait_s: float
    forward_s: float
    sample_s: float
    sent_at: float | None
    arrivals: list[tuple[int, float]]
    peak_memory_bytes: int


ActivityKind = Literal[
    "plan_wait", "feedback_wait", "activation_wait", "send_wait", "forward", "sample", "send"
]


class Activity(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A piece of a stage's time line. began, ended: in seconds of the stage's clock.

    step: that which the stage is at. microbatch: its, -1 while its plan is not there. of: the step
    whose tensor is waited for or sent, else step. ended is None while it goes on. send starts a
    transfer; send_wait waits until one started long before is complete.
    """

    kind: ActivityKind
    step: int
    microbatch: int
    of: int
    began: float
    ended: float | None


class ShowTimeline(msgspec.Struct, tag="show_timeline", array_like=True, frozen=True):
    """To a stage, at any time: answer with your time line, at most its last so many activities."""

    last: int


class Timeline(msgspec.Struct, tag="timeline", array_like=True, frozen=True):
    """A stage's activities, oldest first. now: its clock when it answered."""

    rank: int
    now: float
    activities: list[Activity]


class Failure(msgspec.Struct, tag="failure", array_like=True, frozen=True):
    """A stage gives up.

    kind is the name of the error's class in headrace.errors. step: that which it was computing, if
    it was. lost_peer is the rank that vanished
    or did not do its part, and so is more likely at fault; None if the fault is this stage's own.
    """

    epoch: int
    rank: int
    kind: str
    message: str
    step: int | None
    lost_peer: int | None
    details: str


ToRank = RankConfig | CacheConfig | NewEpoch | Plan | Stop | ShowTimeline
FromRank = Loading | Loaded | Ready | Result | Report | Failure | Timeline
