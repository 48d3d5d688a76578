"""What the user sees on standard error while stages load and while an offline batch runs."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from headrace.engine.outputs import OutputDelta
from headrace.protocol.messages import Loading
from headrace.protocol.ranks import Ranks

# Seconds between two lines of a phase that goes on, where there is no terminal.
_LINE_S = 10.0


@contextmanager
def loading_display(ranks: Ranks, *, lines: bool = False) -> Iterator[Callable[[Loading], None]]:
    """A callback to feed with the stages' progress, shown on standard error: as bars on a
    terminal, with a line for each phase that is over if lines; otherwise as lines alone, one every
    now and then of a phase that takes long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_printer(ranks)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: list[TaskID] = [
            progress.add_task(f"{ranks.name(rank)}: starting", total=1.0)
            for rank in range(ranks.count)
        ]

        def show(message: Loading) -> None:
            progress.update(
                bars[message.rank],
                completed=message.fraction,
                description=f"{ranks.name(message.rank)}: {message.phase}",
            )
            if lines and message.fraction >= 1:
                progress.console.print(_line(message, ranks), highlight=False)

        yield show


def _line_printer(ranks: Ranks) -> Callable[[Loading], None]:
    # By rank and phase: when it was told last, or began.
    told_at: dict[tuple[int, str], float] = {}

    def show(message: Loading) -> None:
        now, phase = time.monotonic(), (message.rank, message.phase)
        if message.fraction >= 1 or now - told_at.setdefault(phase, now) > _LINE_S:
            told_at[phase] = now
            print(_line(message, ranks), file=sys.stderr, flush=True)

    return show


def _line(message: Loading, ranks: Ranks) -> str:
    part = "" if message.fraction >= 1 else f"{message.fraction:.0%} of "
    return f"{ranks.name(message.rank)}: {part}{message.phase}"


@contextmanager
def batch_progress(completions: int, shown: bool) -> Iterator[Callable[[list[OutputDelta]], None]]:
    """A callback to feed with what each step brought; completions: how many are to end."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda _: None
        return
    columns = (
        TextColumn("completions"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=completions, tokens=0, rate=0.0)
        tokens = 0

        def show(deltas: list[OutputDelta]) -> None:
            nonlocal tokens
            tokens += sum(delta.token is not None for delta in deltas)
            elapsed = progress.tasks[0].elapsed or 0.0
            progress.update(
                bar,
                advance=sum(delta.finish_reason is not None for delta in deltas),
                tokens=tokens,
                rate=tokens / elapsed if elapsed else 0.0,
            )

        yield show
