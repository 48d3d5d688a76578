"""Which host this is, as torchrun tells the commands that it starts."""

from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError

# Its name for a setting of ours.
_VARIABLES = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK", "master_addr": "MASTER_ADDR"}
# In use: torchrun's own store listens there.
_PORT = "MASTER_PORT"


def take_from_torchrun(
    engine: dict[str, Any], defaults: Mapping[str, Any], environment: Mapping[str, str]
) -> str | None:
    """Fill in what says which host this is, where all of it was left at its default; and the port,
    where that was.

    A line that says so; None if nothing was taken. Raises UsageError for what does not go together.
    """
    told = any(engine[name] != defaults[name] for name in _VARIABLES)
    if told or not {*_VARIABLES.values(), _PORT} <= environment.keys():
        return None
    if engine["distributed_executor_backend"] == "ray":
        raise UsageError(
            "--distributed-executor-backend ray does not go with torchrun, which starts it on each "
            "host: Ray places the stages, so start it once, without torchrun"
        )
    if (local := environment.get("LOCAL_WORLD_SIZE", "1")) != "1":
        raise UsageError(
            f"torchrun starts {local} processes on each host: give it --nproc-per-node 1, Headrace "
            "starts the processes of its stages itself"
        )
    try:
        for name, variable in _VARIABLES.items():
            text = environment[variable]
            engine[name] = text if name == "master_addr" else int(text)
        port = int(environment[_PORT]) + 1
    except ValueError as error:
        raise UsageError(f"torchrun's environment variables are no numbers: {error}") from error
    line = (
        f"by torchrun this is host {engine['node_rank']} of {engine['nnodes']}, --master-addr "
        f"{engine['master_addr']}"
    )
    if engine["master_port"] != defaults["master_port"]:
        return line
    engine["master_port"] = port
    return f"{line}, and --master-port {port}: that after its {_PORT}, which its own store has"
