"""The watch over the event loop: what it sees, and what it lets pass."""

import asyncio
import gc
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from headrace.serving.loop_watch import BOUND_S, STOOD_STILL, watched
from serving.running_server import running_server


@pytest.fixture(autouse=True)
def nothing_to_collect() -> Iterator[None]:
    """Looking through all that this process's other tests left would be a standstill of its own."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def reports_of(work: Callable[[], Awaitable[None]], again: bool = False) -> list[str]:
    """What the watch says of a task that does this. again: until it has said something."""
    reports: list[str] = []
    told = threading.Event()

    def report(line: str) -> None:
        reports.append(line)
        told.set()

    async def main() -> None:
        await asyncio.create_task(named(work), name="work")
        while again and not told.is_set():
            await asyncio.create_task(named(work), name="work")

    uvloop.run(watched(main(), report))
    return reports


async def named(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def burn(seconds: float) -> None:
    """Use so much CPU time, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_step_that_computes_for_too_long_is_named() -> None:
    async def busy() -> None:
        burn(2 * BOUND_S)

    line, *_ = reports_of(busy, again=True)
    assert line.startswith(f"{STOOD_STILL}: task work used ")
    assert "test_loop_watch.py" in line
    assert line.split(" > ")[-1].endswith(" burn")


def test_a_callback_that_computes_for_too_long_is_named() -> None:
    async def busy() -> None:
        asyncio.get_running_loop().call_soon(burn, 2 * BOUND_S)

    line, *_ = reports_of(busy, again=True)
    assert line.startswith(f"{STOOD_STILL}: a callback used ")


@pytest.mark.parametrize("on_loop", [True, False])
def test_who_lets_nobody_else_into_the_interpreter_is_named(on_loop: bool) -> None:
    def hold() -> None:
        # No step of this is Python's own, at which it would let others in.
        end = time.thread_time() + 2 * BOUND_S
        assert not all(map(end.__gt__, iter(time.thread_time, None)))

    async def held() -> None:
        if on_loop:
            hold()
        else:
            await asyncio.to_thread(hold)

    lines = reports_of(held, again=True)
    assert any("let nobody else into the interpreter" in line for line in lines)


def test_a_step_that_sleeps_is_named() -> None:
    woken = threading.Event()
    reports: list[str] = []

    def report(line: str) -> None:
        reports.append(line)
        woken.set()

    async def main() -> None:
        assert woken.wait(60.0)

    uvloop.run(watched(main(), report))
    (line,) = reports
    assert " slept " in line
    assert "main" in line


def test_many_short_steps_are_no_long_one() -> None:
    async def steps() -> None:
        # Longer than a switch interval: who lets go of the interpreter sooner than he is asked to,
        # and takes it again at once, may keep others out all the while.
        for _ in range(10):
            burn(BOUND_S / 5)
            await asyncio.sleep(0)

    assert reports_of(steps) == []


def test_waiting_for_others_and_work_beside_the_loop_are_no_standstill() -> None:
    async def beside() -> None:
        # Lets others into the interpreter, as tokenizers do.
        data = bytes(1 << 20)

        def work() -> None:
            end = time.thread_time() + 3 * BOUND_S
            while time.thread_time() < end:
                hashlib.sha256(data)

        await asyncio.gather(asyncio.to_thread(work), asyncio.sleep(2 * BOUND_S))

    assert reports_of(beside) == []


_PLANT = """
import sys
if "serve" in sys.orig_argv:
    import time
    from headrace.serving.metrics import ServerMetrics
    render = ServerMetrics.render
    def slow_render(self):
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass
        return render(self)
    ServerMetrics.render = slow_render
"""


def test_a_server_with_a_busy_handler_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_PLANT)
    model = ("--model", "synthetic:1+0", "--kv-cache-memory", "16MiB")
    with (
        pytest.raises(AssertionError, match="slow_render"),
        running_server(*model, PYTHONPATH=str(tmp_path)) as server,
    ):
        httpx.get(f"{server.url}/metrics", timeout=60.0).raise_for_status()
