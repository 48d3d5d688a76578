"""`headrace bench serve`: a load on a running server, with the flags of vLLM's tool."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headrace.bench.machine import machine, versions
from headrace.bench.serve_data import RandomPrompts, SonnetPrompts
from headrace.bench.serve_figures import LoadRun
from headrace.bench.serve_load import Load, measure_load, models_when_ready
from headrace.checks import check_type
from headrace.cli import options
from headrace.cli.printing import print_answer, print_rows, print_where, progress
from headrace.client import Client, environment_api_key
from headrace.errors import ServerError, UsageError

# vllm: what vLLM's command calls openai, too.
_PATHS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
_PARTS = ("mean", "median", "p90", "p99")


def serve(
    backend: Annotated[
        str, typer.Option(help="openai or vllm (completions), or openai-chat.")
    ] = "openai",
    base_url: Annotated[
        str | None, typer.Option(help="The server's address, instead of --host and --port.")
    ] = None,
    host: Annotated[str, typer.Option(help="Of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the server.")] = 8000,
    endpoint: Annotated[
        str | None, typer.Option(help="Path of the requests; default: the backend's.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As the server names it; default: its first.")
    ] = None,
    dataset_name: Annotated[str, typer.Option(help="random or sonnet.")] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="The text whose lines make the sonnet prompts.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests in all.")] = 1000,
    request_rate: Annotated[
        float, typer.Option(help="Requests that arrive a second; inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson arrivals; less: in bursts; more: more even.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests that run at the same time at most.")
    ] = None,
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths differ by up to this part, both ways; below 1.")
    ] = 0.0,
    sonnet_input_len: Annotated[int, typer.Option(help="Tokens of a prompt at most.")] = 550,
    sonnet_output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 150,
    sonnet_prefix_len: Annotated[int, typer.Option(help="Tokens that all prompts share.")] = 200,
    temperature: Annotated[float, typer.Option(help="Of all requests.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have their full length.")
    ] = False,
    ready_check_timeout_sec: Annotated[
        int, typer.Option(help="Wait so many seconds for the server to be ready.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> int:
    """Throughput and latency of a running server, as clients see them.

    The key is taken from HEADRACE_API_KEY. Exit code 1 if a request failed.
    """
    check_type("--backend", backend, Literal["openai", "vllm", "openai-chat"])
    options.check_range("--port", port, 1, 65535)
    options.check_range("--num-prompts", num_prompts, 1, 1_000_000)
    options.check_range("--seed", seed, 0, 2**63 - 1)
    if max_concurrency is not None:
        options.check_range("--max-concurrency", max_concurrency, 1, 1_000_000)
    if not request_rate > 0:
        raise UsageError(f"--request-rate must be above 0, or inf, not {request_rate}")
    if not 0 < burstiness < math.inf:
        raise UsageError(f"--burstiness must be above 0, not {burstiness}")
    if not 0 <= random_range_ratio < 1:
        raise UsageError("--random-range-ratio must be from 0 to below 1")
    check_type("--dataset-name", dataset_name, Literal["random", "sonnet"])
    dataset: RandomPrompts | SonnetPrompts
    if dataset_name == "random":
        options.check_range("--random-input-len", random_input_len, 1, 1_000_000)
        options.check_range("--random-output-len", random_output_len, 1, 1_000_000)
        dataset = RandomPrompts(random_input_len, random_output_len, random_range_ratio)
    else:
        options.check_range("--sonnet-input-len", sonnet_input_len, 1, 1_000_000)
        options.check_range("--sonnet-output-len", sonnet_output_len, 1, 1_000_000)
        options.check_range("--sonnet-prefix-len", sonnet_prefix_len, 0, sonnet_input_len)
        lines = _lines(dataset_path)
        dataset = SonnetPrompts(lines, sonnet_input_len, sonnet_output_len, sonnet_prefix_len)
    load = Load(
        path=endpoint or _PATHS[backend],
        chat=backend == "openai-chat",
        model=model or "",
        dataset=dataset,
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    client = Client(base_url or f"http://{host}:{port}", environment_api_key())
    # Not at the top: they take time that every command would pay.
    import uvloop

    from headrace.cli.coroutines import run_coroutine

    with progress() as say:
        measure = partial(_measure, client, load, ready_check_timeout_sec, say)
        load, run = run_coroutine(measure, uvloop.new_event_loop)
    answer = {
        "backend": backend,
        "base_url": client.root,
        "model_id": load.model,
        "dataset_name": dataset_name,
        "num_prompts": num_prompts,
        # JSON has no infinity.
        "request_rate": request_rate if math.isfinite(request_rate) else "inf",
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        **run.as_json(),
        "machine": machine(),
        "versions": versions(),
    }
    print_answer(answer, as_json, _print_figures)
    if run.errors:
        print(
            f"headrace: {len(run.errors)} of {num_prompts} requests failed, the first with: "
            f"{run.errors[0]}",
            file=sys.stderr,
        )
    return 1 if run.errors else 0


async def _measure(
    client: Client, load: Load, ready_timeout: float, say: Callable[[str], None]
) -> tuple[Load, LoadRun]:
    """The load with its model's name, and what came of it."""
    async with client:
        say(f"waiting for {client.root}")
        models = await models_when_ready(client, ready_timeout)
        if not models:
            raise ServerError(f"{client.root} serves no model")
        load = replace(load, model=load.model or models[0])
        return load, await measure_load(client, load, say)


def _lines(path: Path | None) -> list[str]:
    if path is None:
        raise UsageError("--dataset-name sonnet needs --dataset-path, a text with a verse a line")
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--dataset-path {path} cannot be read: {reason}") from error
    if not "".join(lines).strip():
        raise UsageError(f"--dataset-path {path} is empty")
    return lines


def _print_figures(answer: dict[str, Any]) -> None:
    concurrency = answer["max_concurrency"] or "any number"
    print(
        f"{answer['model_id']} at {answer['base_url']}, {answer['dataset_name']}: "
        f"{answer['num_prompts']} requests, {answer['request_rate']} a second, {concurrency} "
        f"at once; {answer['failed']} failed"
    )
    keys = (
        "duration", "total_input_tokens", "total_output_tokens", "request_throughput",
        "output_throughput", "total_token_throughput", "server_cpu_ms_per_token",
        "client_cpu_ms_per_token",
    )  # fmt: skip
    print_rows([{key: answer[key] for key in keys if key in answer}])
    rows = [
        {"ms": name, **{part: answer.get(f"{part}_{name}_ms", "") for part in _PARTS}}
        for name in ("ttft", "tpot", "itl", "e2el")
    ]
    print_rows(rows)
    print_where(answer)
