"""What a process of the engine has, while nobody asks for anything: what must be the same later.

Planted code counts from within, when a signal asks: the objects of Headrace's own classes, such as
handles, links and sequences, and threads. Descriptors and memory are seen from outside.
"""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import psutil

from command import wait_until

# To be planted where processes are to be counted.
COUNT = """
import collections, gc, json, os, signal, threading

_UNCOUNTED = ("asyncio_", "ThreadPoolExecutor-", "headrace-chats", "census")


def count():
    gc.collect()
    # To see also what was set apart from the collector; what of it is garbage is left all the same.
    gc.disable()
    gc.unfreeze()
    kinds = (type(thing) for thing in gc.get_objects())
    # Of some classes the module is no text.
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    found = collections.Counter(name for name in names if name.startswith("headrace."))
    gc.enable()
    # Of executors there are as many as were ever needed at once.
    found.update(f"thread {t.name.partition(' (')[2] or t.name}" for t in threading.enumerate()
                 if not t.name.startswith(_UNCOUNTED))
    new = FOLDER / f"census-{os.getpid()}.new"
    new.write_text(json.dumps(found), encoding="utf-8")
    new.rename(new.with_suffix(""))


if IS_STAGE or "headrace" in sys.orig_argv:
    # In a thread of its own, which does not hold up an event loop.
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=count, name="census").start())
"""
# Of kinds that begin so there are more or fewer also while nobody asks, but never more than so
# many: microbatches, and what the newest steps left, for some windows; what the watch over the
# event loop looks at; connections whose end was not noted yet, and what was asked by them.
_COME_AND_GO = {
    "headrace.engine.microbatches._Group": 20,
    "headrace.engine.link_time._Way": 100,
    "headrace.pipeline.ledger._Entry": 50,
    "headrace.pipeline.local_link._Receive": 50,
    "headrace.protocol.": 100,
    "headrace.sampling_params.SamplingParams": 5,
    "headrace.serving.connection.Connection": 5,
    "headrace.serving.loop_watch._Stretch": 2,
}


def objects(process: int, folder: Path) -> Counter[str]:
    """How many objects of Headrace's classes, and threads, there are in a process in which COUNT
    was planted, from this folder.

    Garbage that the collector was told to leave alone counts the first time, and is gone then.
    """
    answer = folder / f"census-{process}"
    os.kill(process, signal.SIGUSR1)
    wait_until(answer.exists)
    found: Counter[str] = Counter(json.loads(answer.read_text(encoding="utf-8")))
    answer.unlink()
    for beginning, most in _COME_AND_GO.items():
        for kind in [kind for kind in found if kind.startswith(beginning) and found[kind] <= most]:
            del found[kind]
    return found


def descriptors(process: int) -> Counter[str]:
    """What a process has open, by kind (Linux: Documentation/filesystems/proc.rst, fd). Empty if it
    is gone."""
    found: Counter[str] = Counter()
    try:
        entries = list(Path(f"/proc/{process}/fd").iterdir())
    except FileNotFoundError:
        return found
    for entry in entries:
        try:
            name = os.readlink(entry)
        except FileNotFoundError:
            continue
        # Of sockets and pipes without their numbers.
        kind = re.sub(r":?\[[0-9]+\]", "", name)
        found[f"open {kind}"] += 1
    return found


def more(before: Counter[str], now: Counter[str]) -> list[str]:
    """What there is now and was not before, in words."""
    return [f"{count} more {kind}" for kind, count in sorted((now - before).items())]


def memory_mib(process: int) -> float:
    """MiB of a process's memory that no file lies behind; what it shares counts in parts (Linux:
    Documentation/filesystems/proc.rst, smaps_rollup). Raises psutil.NoSuchProcess if it is gone."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(process) from error
    sizes = dict(re.findall(r"^(Pss_Anon|Pss_Shmem): +(\d+) kB$", text, re.MULTILINE))
    return sum(int(size) for size in sizes.values()) / 1024
