"""`headrace serve`: the OpenAI-compatible server."""

import logging
import os
import time
from collections.abc import Callable
from typing import Annotated

import typer

import headrace
from headrace.async_llm import AsyncLLM
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.cli import options
from headrace.config import EngineConfig, parse_size
from headrace.conversation import check_chats
from headrace.errors import UsageError
from headrace.progress import loading_display
from headrace.serving.listener import listen, url_of
from headrace.serving.loading import EngineLoader
from headrace.serving.open_files import raise_open_files
from headrace.serving.settings import ServerSettings, parse_list
from headrace.signals import EndingSignals, exit_code

_log = logging.getLogger(__name__)

_KEY_VARIABLE = "HEADRACE_API_KEY"
_WATCH_VARIABLE = "HEADRACE_WATCH_LOOP"


def serve(
    context: typer.Context,
    model_tag: options.ModelArgument = None,
    model: options.ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Key that requests must have; may be repeated. Better: {_KEY_VARIABLE}."
        ),
    ] = None,
    shared_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--shared-prefix-cache",
            help="Requests of different keys share the prefix cache: each can tell by timing what "
            "others sent.",
        ),
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model; may be repeated. Default: --model."),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Completions that may wait for a slot; more are refused with 429.")
    ] = 4096,
    max_body_size: Annotated[str, typer.Option(help="Of a request, such as 16MiB.")] = "16MiB",
    read_timeout: Annotated[
        float, typer.Option(help="Seconds for a request's header, and its body, to arrive.")
    ] = 30.0,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a whole answer; default: no limit.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have after SIGTERM.")
    ] = 30.0,
    sse_keep_alive_interval: Annotated[
        float,
        typer.Option(help="Seconds of silence in a stream before a comment line; 0: none."),
    ] = 15.0,
    allowed_origins: Annotated[str, typer.Option(help="CORS, a JSON list.")] = '["*"]',
    allowed_methods: Annotated[str, typer.Option(help="CORS, a JSON list.")] = '["*"]',
    allowed_headers: Annotated[str, typer.Option(help="CORS, a JSON list.")] = '["*"]',
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="CORS: let browsers send cookies.")
    ] = False,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its key, if it is not inside.")] = None,
    pipeline_parallel_size: options.PipelineParallelSize = 1,
    layer_partition: options.LayerPartition = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    scheduling_policy: options.SchedulingPolicy = "fcfs",
    prefill_policy: options.PrefillPolicy = "even",
    max_itl_ms: options.MaxItlMs = None,
    block_size: options.BlockSize = 16,
    kv_cache_memory: options.KvCacheMemory = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.5,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    max_logprobs: Annotated[
        int, typer.Option(help="The most that a request may ask for; -1: no limit.")
    ] = 20,
    token_feedback: options.TokenFeedback = "deferred",
    num_microbatches: options.NumMicrobatches = "auto",
    link_latency_ms: options.LinkLatencyMs = 0.0,
    link_bandwidth_mbps: options.LinkBandwidthMbps = None,
    cpu_threads: options.CpuThreads = None,
    cpu_bind: options.CpuBind = "auto",
    generation_config: options.GenerationConfig = "auto",
    seed: options.Seed = 0,
    master_addr: options.MasterAddr = "127.0.0.1",
    master_port: options.MasterPort = 0,
    stall_timeout: options.StallTimeout = 60.0,
    debug: options.Debug = False,
) -> int:
    """Serve a model by OpenAI's API until SIGTERM, which lets running requests end."""
    started = time.monotonic()
    model = options.one_model("serve", model_tag, model)
    engine_settings = options.engine_settings(context)
    # A wrong value is told before anything else happens.
    EngineConfig.of("serve", model, engine_settings)
    body_bytes = parse_size(max_body_size)
    if body_bytes is None:
        raise UsageError(f"--max-body-size {max_body_size!r} is not a size such as 16MiB")
    settings = ServerSettings(
        served_model_names=tuple(served_model_name or [model]),
        host=host,
        port=port,
        api_keys=_api_keys(api_key),
        shared_prefix_cache=shared_prefix_cache,
        max_queued_requests=max_queued_requests,
        max_body_bytes=body_bytes,
        read_timeout=read_timeout,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        sse_keep_alive_interval=sse_keep_alive_interval,
        allowed_origins=parse_list("--allowed-origins", allowed_origins),
        allowed_methods=parse_list("--allowed-methods", allowed_methods),
        allowed_headers=parse_list("--allowed-headers", allowed_headers),
        allow_credentials=allow_credentials,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        watch_loop=_WATCH_VARIABLE in os.environ,
        max_connections=raise_open_files(pipeline_parallel_size),
    )
    _log_to_standard_error()
    listener = listen(settings)
    url = url_of(settings, listener)

    def on_listening() -> None:
        print(f"headrace {headrace.__version__} listens on {url}, not ready yet", flush=True)

    ready = False

    def on_ready(engine: AsyncLLM) -> None:
        nonlocal ready
        ready = True
        print(_engine_line(engine), flush=True)
        seconds = time.monotonic() - started
        print(f"ready after {seconds:.1f} s: {url}/v1 (SIGTERM or Ctrl-C: drain)", flush=True)

    def load(check: Callable[[], None]) -> AsyncLLM:
        with loading_display(pipeline_parallel_size, lines=True) as show:
            return AsyncLLM(
                model, on_progress=show, check=check, on_tokenizer=_on_tokenizer, **engine_settings
            )

    # Before the loader, whose thread nothing must leave alone.
    signals = EndingSignals()
    loader = EngineLoader(load)
    try:
        # Here, since all commands import this module, and meanwhile the stages load.
        from headrace.serving.server import run_server

        run_server(settings, listener, loader, signals, on_listening, on_ready)
    finally:
        loader.close()
    print("ended in order", flush=True)
    return 0 if ready else exit_code(signals.numbers[0])


def _on_tokenizer(tokenizer: Tokenizer) -> None:
    """Renders a first chat, for which much has to be imported, while the stages load."""
    try:
        check_chats(tokenizer)
    except UsageError as error:
        _log.warning("chats will be refused: %s", error)


def _api_keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys of the flags, or else that of the environment, which the stages then do not see."""
    from_environment = os.environ.pop(_KEY_VARIABLE, None)
    # One that is empty is refused later: it was meant to be a key.
    return tuple(given or ([] if from_environment is None else [from_environment]))


def _log_to_standard_error() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    # What uvicorn says of its own life is said here already.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Whether a line of the access log is about more than a probe or a scrape, which come every
    few seconds and say nothing new."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and arguments[2:3] in (("/health",), ("/metrics",)))


def _engine_line(engine: AsyncLLM) -> str:
    running = engine.running
    block_size = engine.config.block_size
    cache = max(loaded.cache_bytes_per_block for loaded in running.loaded) * running.num_blocks
    layers = " and ".join(str(share.num_layers) for share in running.shares)
    return (
        f"engine: {running.dtype}, {_counted(len(running.shares), 'stage')} with {layers} layers, "
        f"{running.loaded[0].kernels} kernels, cache for {running.num_blocks * block_size} tokens "
        f"({cache / 2**20:.0f} MiB a stage), at most {running.max_model_len} tokens a sequence, "
        f"{engine.config.sequences} sequences at once"
    )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
