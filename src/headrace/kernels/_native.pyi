"""What the native extension has. Addresses and sizes are numbers; see native/module.cpp."""

from collections.abc import Callable, Sequence

threaded: bool

def path_names() -> list[str]: ...
def use_path(name: str) -> None: ...
def path_name() -> str: ...
def multiplies_bfloat16() -> bool: ...
def packed_size(outs: int, ins: int, bfloat16: bool, /) -> int: ...
def pack(weight: int, packed: int, outs: int, ins: int, bfloat16: bool, /) -> None: ...
def linear(
    x: int,
    packed: int,
    bias: int,
    y: int,
    rows: int,
    outs: int,
    ins: int,
    bfloat16: bool,
    /,
) -> None: ...
def quantized_size(form: tuple[int, int, bool, int], outs: int, ins: int, /) -> int: ...
def pack_quantized(
    kind: str,
    rows_from: int,
    rows: int,
    row_bytes: int,
    outs: int,
    first_block: int,
    blocks: int,
    to_block: int,
    packed: int,
    ins: int,
    /,
) -> None: ...
def quantized(
    x: int,
    packed: int,
    bias: int,
    y: int,
    rows: int,
    outs: int,
    ins: int,
    y_stride: int,
    form: tuple[int, int, bool, int],
    bfloat16: bool,
    /,
) -> None: ...
def embed_quantized(
    packed: int,
    ids: int,
    out: int,
    rows: int,
    width: int,
    scale: float,
    first: int,
    held: int,
    form: tuple[int, int, bool, int],
    bfloat16: bool,
    /,
) -> None: ...
def rms_norm(
    x: int,
    delta: int,
    weight: int,
    out: int,
    rows: int,
    width: int,
    epsilon: float,
    rounds_once: bool,
    bfloat16: bool,
    /,
) -> None: ...
def head_norm(
    x: int,
    weight: int,
    rows: int,
    stride: int,
    heads: int,
    width: int,
    epsilon: float,
    bfloat16: bool,
    /,
) -> None: ...
def gate(x: int, out: int, rows: int, width: int, activation: str, bfloat16: bool, /) -> None: ...
def gated_add(x: int, delta: int, gate: int, rows: int, width: int, bfloat16: bool, /) -> None: ...
def scale(x: int, count: int, factor: float, bfloat16: bool, /) -> None: ...
def route(
    scores: int, rows: int, experts: int, chosen: int, normalized: bool, bfloat16: bool, /
) -> None: ...
def experts(
    x: int,
    weights: int,
    out: int,
    gate_up: int,
    gate_up_bias: int,
    down: int,
    down_bias: int,
    rows: int,
    count: int,
    hidden: int,
    inner: int,
    activation: str,
    bfloat16: bool,
    /,
) -> None: ...
def soft_cap(x: int, count: int, cap: float, bfloat16: bool, /) -> None: ...
def embed(
    table: int,
    ids: int,
    out: int,
    rows: int,
    width: int,
    scale: float,
    first: int,
    held: int,
    bfloat16: bool,
    /,
) -> None: ...
def choose(
    logits: int, stride: int, width: int, choices: int, count: int, tokens: int, bfloat16: bool, /
) -> None: ...
def rotate_and_write(
    qkv: int,
    cos: int,
    sin: int,
    positions: int,
    cache_index: int,
    keys: int,
    values: int,
    tokens: int,
    heads: int,
    block_size: int,
    block_rows: int,
    kv_heads: int,
    head_dim: int,
    bfloat16: bool,
    /,
) -> None: ...
def attention(
    q: int,
    q_stride: int,
    keys: int,
    values: int,
    block_tables: int,
    table_width: int,
    query_starts: int,
    context_lens: int,
    sinks: int,
    out: int,
    rows: int,
    heads: int,
    window: int,
    scale: float,
    soft_cap: float,
    block_size: int,
    block_rows: int,
    kv_heads: int,
    head_dim: int,
    bfloat16: bool,
    /,
) -> None: ...
def take_profile() -> dict[str, float]: ...

class Step:
    def __init__(
        self,
        buffers: list[int],
        tokens: int,
        ids: int = 0,
        positions: int = 0,
        cache_index: int = 0,
        block_tables: int = 0,
        table_width: int = 0,
        query_starts: int = 0,
        context_lens: int = 0,
        rows: int = 0,
    ) -> None: ...
    def put(self, place: int, buffer: int, /) -> None: ...

class Exchange:
    def __init__(self) -> None: ...
    @staticmethod
    def memory_size(shards: int) -> int: ...
    def join(
        self,
        memory: int,
        shard: int,
        shards: int,
        spin_s: float,
        check: Callable[[int, float], None],
    ) -> None: ...
    def leave(self) -> None: ...
    def room(self, shard: int, round: int) -> int: ...
    def own_part(self, round: int, within_s: float) -> tuple[int, bool] | None: ...
    def has_come(self, shard: int, round: int) -> None: ...
    def all_reduce(self, x: int, count: int, bfloat16: bool) -> None: ...
    def gather(
        self, part: int, out: int, rows: int, widths: Sequence[int], size: int, on_all: bool
    ) -> None: ...

class Program:
    def __init__(self, bfloat16: bool) -> None: ...
    def embed(
        self,
        label: str,
        out: int,
        table: int,
        vocab: int,
        width: int,
        scale: float,
        first: int,
        held: int,
    ) -> None: ...
    def norm(
        self,
        label: str,
        source: int,
        delta: int,
        out: int,
        weight: int,
        width: int,
        epsilon: float,
        rounds_once: bool,
    ) -> None: ...
    def head_norm(
        self,
        label: str,
        buffer: int,
        weight: int,
        stride: int,
        first: int,
        heads: int,
        head_dim: int,
        epsilon: float,
    ) -> None: ...
    def linear(
        self,
        label: str,
        source: int,
        out: int,
        packed: int,
        bias: int,
        outs: int,
        ins: int,
        bfloat16_weights: bool,
    ) -> None: ...
    def quantized(
        self,
        label: str,
        source: int,
        out: int,
        packed: int,
        bias: int,
        outs: int,
        ins: int,
        first: int,
        stride: int,
        form: tuple[int, int, bool, int],
    ) -> None: ...
    def embed_quantized(
        self,
        label: str,
        out: int,
        packed: int,
        vocab: int,
        width: int,
        scale: float,
        first: int,
        held: int,
        form: tuple[int, int, bool, int],
    ) -> None: ...
    def rotate(
        self,
        label: str,
        qkv: int,
        heads: int,
        cos: int,
        sin: int,
        keys: int,
        values: int,
        block_size: int,
        block_rows: int,
        kv_heads: int,
        head_dim: int,
        bfloat16_cache: bool,
    ) -> None: ...
    def attention(
        self,
        label: str,
        qkv: int,
        out: int,
        heads: int,
        keys: int,
        values: int,
        sinks: int,
        window: int,
        scale: float,
        soft_cap: float,
        block_size: int,
        block_rows: int,
        kv_heads: int,
        head_dim: int,
        bfloat16_cache: bool,
    ) -> None: ...
    def gate(self, label: str, source: int, out: int, width: int, activation: str) -> None: ...
    def add(self, label: str, out: int, delta: int, width: int) -> None: ...
    def gated_add(self, label: str, out: int, delta: int, gate: int, width: int) -> None: ...
    def scale(self, label: str, buffer: int, width: int, factor: float) -> None: ...
    def route(
        self, label: str, buffer: int, experts: int, chosen: int, normalized: bool
    ) -> None: ...
    def experts(
        self,
        label: str,
        source: int,
        weights: int,
        out: int,
        gate_up: int,
        gate_up_bias: int,
        down: int,
        down_bias: int,
        experts: int,
        hidden: int,
        inner: int,
        activation: str,
    ) -> None: ...
    def all_reduce(self, label: str, buffer: int, width: int, exchange: Exchange) -> None: ...
    def gather(
        self, label: str, source: int, out: int, widths: Sequence[int], exchange: Exchange
    ) -> None: ...
    def soft_cap(self, label: str, buffer: int, width: int, cap: float) -> None: ...
    def run(self, step: Step, /) -> None: ...
