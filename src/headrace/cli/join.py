"""`headrace join`: this host runs stages for an engine on another."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.flags import engine_flags, with_flags
from headrace.config import DEFAULT_PORT
from headrace.deployment.hosts import joining_agent
from headrace.errors import UsageError
from headrace.host.cluster_key import read_cluster_key
from headrace.pipeline.agent import Agent


@with_flags
def join(
    address: Annotated[
        str, typer.Argument(help="The engine's host, and its --master-port: HOST[:PORT].")
    ],
    here: Annotated[
        str | None,
        typer.Option(
            "--model", help="Where the model lies here; default: as on that host, if at all."
        ),
    ] = None,
    number: Annotated[
        int | None, typer.Option("--node-rank", help="Which host this is; default: any.", min=1)
    ] = None,
    *,
    engine: Annotated[
        dict[str, Any],
        engine_flags("cluster_key_file", "interface", "join_timeout", "send_weights"),
    ],
    debug: options.Debug = False,
) -> int:
    """Run stages for an engine on another host, until it ends."""
    host, port = _host_and_port(address)
    if engine["cluster_key_file"] is None:
        raise UsageError("join needs --cluster-key-file, a copy of the engine's host's")
    run_agent(
        joining_agent(
            host,
            port,
            secret=read_cluster_key(Path(engine["cluster_key_file"])),
            interface=engine["interface"],
            node_rank=number,
            layout=None,
            model=here,
            receives=engine["send_weights"],
            join_timeout_s=engine["join_timeout"],
            say=say,
        )
    )
    return 0


def run_agent(agent: Agent) -> None:
    """Until the engine has ended in order. Raises what makes the host leave before."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    agent.run()
    print("ended in order", flush=True)


def say(line: str) -> None:
    """To whoever started the agent."""
    print(line, flush=True)


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon:
        return address, DEFAULT_PORT
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is no HOST:PORT, as in: headrace join 10.0.0.1:29501")
    return host, int(port)
