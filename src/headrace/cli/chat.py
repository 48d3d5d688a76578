"""`headrace chat`: talk to a model in this process, or to one on a server."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.config import EngineConfig
from headrace.errors import UsageError
from headrace.progress import loading_display
from headrace.sampling_params import SamplingParams

# What makes sense only for a model on a server.
_SERVER_FLAGS = {"model_name", "api_key"}


@with_flags
def chat(
    context: typer.Context,
    model_tag: options.ModelArgument = None,
    model: options.ModelOption = None,
    url: Annotated[
        str | None, typer.Option(help="A running server instead, as http://127.0.0.1:8000.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Which of the server's models; default: its first.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The server's key; default: HEADRACE_API_KEY."),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="What the model is told before anything is said.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer; default: what the context has left.")
    ] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: Annotated[int | None, typer.Option(help="Fixes each answer's random numbers.")] = None,
    *,
    engine: Annotated[
        dict[str, Any],
        engine_flags(
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "weights",
            "layer_partition",
            "dtype",
            "max_model_len",
            "kv_cache_memory",
            "cpu_threads",
            "cpu_bind",
        ),
    ],
    debug: options.Debug = False,
) -> int:
    """Talk to a model in the terminal; /help there shows what else it understands."""
    # Here, since all commands import this module, and asyncio takes its time.
    from headrace.async_llm import AsyncLLM
    from headrace.cli.chat_answers import engine_answers, served_model, server_answers
    from headrace.cli.chat_session import Session
    from headrace.cli.coroutines import run_coroutine
    from headrace.client import environment_api_key
    from headrace.conversation import check_chats

    if model_tag is not None:
        model = options.one_model("chat", model_tag, model)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    # Also for a server: a wrong value is found before anything is said.
    SamplingParams(**{"max_tokens": None, **sampling})
    if url is not None and model is None:
        _refuse(context, engine, "--url: the server has its own")
        key = api_key or environment_api_key()
        name = model_name or run_coroutine(lambda: served_model(url, key))
        return Session(server_answers(url, key, name, sampling), system_prompt).run()
    if model is None or url is not None:
        raise UsageError("chat needs a model (runs it here) or --url (of a server)")
    _refuse(context, _SERVER_FLAGS, "--model: they are for --url")
    # One conversation: its earlier turns are found in the prefix cache.
    config = EngineConfig(model=model, max_num_seqs=1, **engine)
    with loading_display(config.ranks) as on_progress:
        llm = AsyncLLM(config, on_progress=on_progress, on_tokenizer=check_chats)
    if sys.stdin.isatty():
        print(f"{model}: {llm.card.line}", file=sys.stderr)
    defaults: dict[str, Any] = {"max_tokens": None, **llm.card.sampling_defaults}
    params = SamplingParams(**defaults | sampling)
    with llm:
        return Session(engine_answers(llm, params), system_prompt).run()


def _refuse(context: typer.Context, flags: Iterable[str], reason: str) -> None:
    """Raises UsageError for the first of the flags that was given."""
    for flag in sorted(flags):
        source = context.get_parameter_source(flag)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{flag.replace('_', '-')} does not go with {reason}")
