"""All that there is of a server while nobody asks for anything, to be compared with later."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from census import descriptors, more, objects
from leftovers import files_left, processes_left
from serving.running_server import Server
from stage_processes import stage_processes


@dataclass
class Outside:
    """What can be seen of a server without asking it. opened: descriptors of server and stages, by
    name; others: what else it started, and what has ended that nobody took note of."""

    opened: dict[str, Counter[str]]
    others: set[str]
    files: set[str]

    def left_since(self, before: "Outside") -> list[str]:
        """What there is more of than before, in words."""
        found = [*sorted(self.others - before.others), *sorted(self.files - before.files)]
        return [f"{thing} is left" for thing in found] + _more(before.opened, self.opened)


@dataclass
class Inside:
    """What the processes count in themselves, by name."""

    objects: dict[str, Counter[str]]

    def left_since(self, before: "Inside") -> list[str]:
        """What there is more of than before, in words."""
        return _more(before.objects, self.objects)


def stages(server: Server) -> dict[str, int]:
    """Its living stages' process ids, by name."""
    found = stage_processes(server.command.process.pid)
    return {f"rank {rank}": process for rank, process in found.items()}


def processes(server: Server) -> dict[str, int]:
    """The server's process id and its living stages', by name."""
    return {"server": server.command.process.pid, **stages(server)}


def look_outside(server: Server, temporary: Path) -> Outside:
    """temporary: where its temporary files lie."""
    known = processes(server)
    children = psutil.Process(known["server"]).children(recursive=True)
    started = {*server.command.processes(), *(child.pid for child in children)}
    return Outside(
        opened={name: descriptors(process) for name, process in known.items()},
        others=set(processes_left(started - set(known.values()))),
        files=set(files_left(temporary)),
    )


def look_inside(server: Server, planted: Path) -> Inside:
    """planted: the folder from which counting was planted in its processes."""
    known = processes(server)
    return Inside({name: objects(process, planted) for name, process in known.items()})


def _more(before: dict[str, Counter[str]], now: dict[str, Counter[str]]) -> list[str]:
    return [
        f"{name} has {line}"
        for name in now
        if name in before
        for line in more(before[name], now[name])
    ]
