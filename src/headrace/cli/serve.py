"""`headrace serve`: the OpenAI-compatible server."""

import logging
import os
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

import headrace
from headrace.async_llm import AsyncLLM
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.cli import options
from headrace.cli.dry_run import print_deployment
from headrace.cli.flags import all_flags, with_flags
from headrace.cli.join import run_agent, say
from headrace.cli.torchrun import take_from_torchrun
from headrace.config import EngineConfig
from headrace.conversation import check_chats
from headrace.deployment.hosts import agent_of
from headrace.errors import UsageError
from headrace.progress import loading_display
from headrace.serving.listener import listen, url_of
from headrace.serving.loading import EngineLoader
from headrace.serving.open_files import raise_open_files
from headrace.serving.settings import KEY_VARIABLE, ServerSettings
from headrace.setting import declared_settings
from headrace.signals import EndingSignals, exit_code, on_ending_signals

_log = logging.getLogger(__name__)

_WATCH_VARIABLE = "HEADRACE_WATCH_LOOP"


@with_flags
def serve(
    model_tag: options.ModelArgument = None,
    model: options.ModelOption = None,
    *,
    server: Annotated[dict[str, Any], all_flags(ServerSettings)],
    engine: Annotated[dict[str, Any], all_flags(EngineConfig, without=("model",))],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print one JSON object.")
    ] = False,
    debug: options.Debug = False,
) -> int:
    """Serve a model by OpenAI's API until SIGTERM, which lets running requests end."""
    started = time.monotonic()
    model = options.one_model("serve", model_tag, model)
    defaults = {name: each.default for name, each in declared_settings(EngineConfig).items()}
    if (taken := take_from_torchrun(engine, defaults, os.environ)) is not None:
        print(taken, flush=True)
    # A wrong value is told before anything else happens.
    config = EngineConfig(model=model, **engine)
    if as_json and not dry_run:
        raise UsageError("--json needs --dry-run: a server prints no JSON object")
    if dry_run:
        print_deployment(config, as_json=as_json)
        return 0
    if config.node_rank:
        run_agent(agent_of(config, say))
        return 0
    server["api_keys"] = _api_keys(server["api_keys"])
    server["served_model_names"] = server["served_model_names"] or (model,)
    settings = ServerSettings(
        watch_loop=_WATCH_VARIABLE in os.environ,
        max_connections=raise_open_files(config.ranks.count),
        **server,
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
        print(f"engine: {engine.card.line}", flush=True)
        seconds = time.monotonic() - started
        print(f"ready after {seconds:.1f} s: {url}/v1 (SIGTERM or Ctrl-C: drain)", flush=True)

    def load(check: Callable[[], None]) -> AsyncLLM:
        with loading_display(config.ranks, lines=True) as show:
            return AsyncLLM(config, on_progress=show, check=check, on_tokenizer=_on_tokenizer)

    # Before the loader, whose thread nothing must leave alone.
    signals = EndingSignals()
    on_ending_signals(signals.take)
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


def _api_keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of the flags, or else that of the environment, which the stages then do not see."""
    from_environment = os.environ.pop(KEY_VARIABLE, None)
    # One that is empty is refused later: it was meant to be a key.
    return given or (() if from_environment is None else (from_environment,))


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
