"""What an engine can be told, with vLLM's names where vLLM has them."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from headrace.checks import unknown_name
from headrace.engine.prefill_policy import PrefillPolicyName
from headrace.errors import UsageError
from headrace.protocol.messages import LinkEmulation
from headrace.protocol.ranks import Ranks
from headrace.sampling_params import MAX_SEED
from headrace.setting import Setting, check_settings, declared_settings, size_in_bytes

_MAX_NUM_SEQS = 256
# Where the engine's host waits for others, unless it is told otherwise.
DEFAULT_PORT = 29501
_SAID_BY_RAY = ("node_rank", "master_addr", "interface", "cluster_key_file")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, each declared here alone: the commands' flags are made of it.

    Raises UsageError naming the flag for a value out of range, and for values that do not go
    together.
    """

    model: Annotated[str, Setting("GGUF file, Hugging Face directory, or smollm2.")]
    pipeline_parallel_size: Annotated[int, Setting("Number of stages.", short="-pp", least=1)] = 1
    tensor_parallel_size: Annotated[
        int,
        Setting(
            "Shards of each stage, that compute its layers together.",
            short="-tp",
            least=1,
        ),
    ] = 1
    layer_partition: Annotated[
        str | None, Setting("Layers per stage, such as 19,11; default: by cost.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Setting(
            "float32, bfloat16, float16; auto: bfloat16 unless checkpoint or cores call for "
            "float32."
        ),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "stored", "dequantized"],
        Setting(
            "stored: a GGUF file's quantized weights stay as they are, activations are rounded to "
            "8 bits; dequantized: to the dtype; auto: stored with bfloat16, except on AMX."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None, Setting("Positions a sequence may have; default: the model's.", least=1)
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Setting(
            f"Sequences that run at the same time; default: {_MAX_NUM_SEQS}, or as many as a step "
            "has tokens.",
            least=1,
        ),
    ] = None
    max_num_batched_tokens: Annotated[int, Setting("Tokens in one step.", least=1)] = 512
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Setting("fcfs: first come, first served; priority: requests may have one."),
    ] = "fcfs"
    prefill_policy: Annotated[
        PrefillPolicyName,
        Setting("even: steps of the same cost; budget: always as many tokens."),
    ] = "even"
    max_itl_ms: Annotated[
        float | None,
        Setting(
            "The most between two tokens while prompts are read, as far as the engine can foresee; "
            "default: 9 times what it is while none are.",
            above=0,
        ),
    ] = None
    block_size: Annotated[int, Setting("Positions in a KV-cache block.", least=1)] = 16
    kv_cache_memory: Annotated[
        int | str | None,
        Setting("KV cache a stage, such as 2GiB; default: a part of the free memory.", size=True),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Setting(
            "KV cache of all stages, as a part of the memory free after loading.", above=0, most=1
        ),
    ] = 0.5
    enable_prefix_caching: Annotated[
        bool, Setting("Keep blocks of ended requests for others that begin the same.")
    ] = True
    max_logprobs: Annotated[
        int,
        Setting(
            "Log-probabilities of a position that a request may ask for; -1: no limit.", least=-1
        ),
    ] = 20
    token_feedback: Annotated[
        Literal["deferred", "blocking"],
        Setting("deferred, or blocking to measure what engines used to do."),
    ] = "deferred"
    num_microbatches: Annotated[
        int | None,
        Setting("Groups of sequences that take turns; auto: as many as pay.", least=1, none="auto"),
    ] = None
    link_backend: Annotated[
        Literal["auto", "local", "gloo"],
        Setting(
            "What carries tensors: local, within one host; gloo, of torch.distributed; auto: local."
        ),
    ] = "auto"
    link_latency_ms: Annotated[
        float,
        Setting("Emulate links that take so long for a message, one way.", least=0, most=60_000),
    ] = 0.0
    link_bandwidth_mbps: Annotated[
        float | None, Setting("Emulate links of so many megabits a second.", above=0)
    ] = None
    cpu_threads: Annotated[
        int | None,
        Setting("OpenMP threads of each stage; default: one on each of its cores.", least=1),
    ] = None
    cpu_bind: Annotated[
        str, Setting("auto: disjoint cores, a thread each; none; or each stage's, as 0-3|4-7.")
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none", "vllm"],
        Setting(
            "auto: the model's sampling defaults for what is left out; none, or vLLM's word vllm: "
            "not."
        ),
    ] = "auto"
    seed: Annotated[
        int,
        Setting("Base of the random numbers of requests without a seed.", least=0, most=MAX_SEED),
    ] = 0
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"],
        Setting(
            "mp: stages run here, and on hosts that join; ray: on nodes of the Ray cluster that "
            "this host belongs to (none is started): as many as --nnodes says, or one a stage."
        ),
    ] = "mp"
    nnodes: Annotated[int, Setting("Hosts that the stages run on.", least=1)] = 1
    node_rank: Annotated[int, Setting("Which of them this one is; 0 has the engine.", least=0)] = 0
    master_addr: Annotated[
        str,
        Setting("Address of the engine's host, as others reach it; with gloo, where stages meet."),
    ] = "127.0.0.1"
    master_port: Annotated[
        int,
        Setting(
            f"Its port; 0: {DEFAULT_PORT} if there are several hosts, else a free one.",
            least=0,
            most=65535,
        ),
    ] = 0
    interface: Annotated[
        str | None,
        Setting(
            "Network interface, or address, for what hosts send each other; default: that which "
            "leads to --master-addr."
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Setting("File that lets hosts in, the same on all (headrace key makes one)."),
    ] = None
    insecure_links: Annotated[
        bool,
        Setting("Do not encrypt what stages on different hosts send each other."),
    ] = False
    send_weights: Annotated[
        bool,
        Setting(
            "Hosts without the model are sent what their stages need of it. It stays in "
            "~/.cache/headrace/weights (or under XDG_CACHE_HOME), which may be deleted."
        ),
    ] = True
    join_timeout: Annotated[
        float,
        Setting(
            "Seconds to wait for other hosts. If one stays away for longer while the engine runs, "
            "the others take over its layers, if they have the memory.",
            above=0,
            most=86_400,
        ),
    ] = 300.0
    stall_timeout: Annotated[
        float,
        Setting(
            "Seconds in which no stage gets on, nor computes, that are an error.",
            above=0,
            most=86_400,
        ),
    ] = 60.0
    max_restarts: Annotated[
        int,
        Setting(
            "How often in --restart-window stages that died, failed or stood still are started "
            "anew, and requests go on; 0: the first fault ends the engine.",
            least=0,
        ),
    ] = 10
    restart_window: Annotated[
        float, Setting("Seconds in which restarts are counted.", above=0, most=86_400 * 366)
    ] = 600.0

    def __post_init__(self) -> None:
        check_settings(self)
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
        self._check_hosts()

    def _check_hosts(self) -> None:
        on_ray = self.distributed_executor_backend == "ray"
        if on_ray:
            self._check_ray()
        if self.node_rank >= self.nnodes:
            raise UsageError(
                f"--node-rank {self.node_rank} must be less than --nnodes {self.nnodes}"
            )
        if self.nnodes == 1 and not on_ray:
            return
        if self.cluster_key_file is None and not on_ray:
            raise UsageError(
                f"--nnodes {self.nnodes} needs --cluster-key-file, which lets the hosts in: "
                "headrace key FILE makes one; copy it to every host"
            )
        if self.nnodes > self.ranks.count:
            raise UsageError(
                f"--nnodes {self.nnodes} needs as many stages, or shards of stages: "
                f"--pipeline-parallel-size {self.pipeline_parallel_size} and "
                f"--tensor-parallel-size {self.tensor_parallel_size} make {self.ranks.count}"
            )
        if self.link_backend == "gloo":
            hosts = "--distributed-executor-backend ray" if on_ray else f"--nnodes {self.nnodes}"
            raise UsageError(
                f"{hosts} goes with links of Headrace's own, not with "
                "--link-backend gloo, which lets strangers in"
            )

    def _check_ray(self) -> None:
        for declared in declared_settings(EngineConfig).values():
            if declared.name in _SAID_BY_RAY and getattr(self, declared.name) != declared.default:
                raise UsageError(
                    f"{declared.flag} does not go with --distributed-executor-backend ray, which "
                    "says it by itself"
                )

    @classmethod
    def of(cls, user: str, model: "str | EngineConfig", settings: dict[str, Any]) -> "EngineConfig":
        """The config of what `user` was given: a model's name, or a config, and settings of it as
        keyword arguments. Raises UsageError for one there is not."""
        known = {field.name for field in fields(cls)}
        for name in settings:
            if name not in known:
                raise unknown_name(user, "setting", name, known)
        if isinstance(model, EngineConfig):
            return replace(model, **settings)
        return cls(model=model, **settings)

    @property
    def ranks(self) -> Ranks:
        """The pipeline's processes."""
        return Ranks(self.pipeline_parallel_size, self.tensor_parallel_size)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of cache a stage, if they are given."""
        return None if self.kv_cache_memory is None else size_in_bytes(self.kv_cache_memory)

    @property
    def sequences(self) -> int:
        """Sequences that may run at the same time."""
        return self.max_num_seqs or min(_MAX_NUM_SEQS, self.max_num_batched_tokens)

    @property
    def link_emulation(self) -> LinkEmulation | None:
        """How slow links are to be, if they are to be slower than they are."""
        if not self.link_latency_ms and self.link_bandwidth_mbps is None:
            return None
        mbps = self.link_bandwidth_mbps
        return LinkEmulation(self.link_latency_ms / 1e3, None if mbps is None else mbps * 1e6 / 8)
