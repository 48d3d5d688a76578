"""What the user sees while stages load: bars on a terminal, a line a stage in a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from headrace.protocol.messages import Loading


@contextmanager
def loading_display(num_stages: int) -> Iterator[Callable[[Loading], None]]:
    """A callback to feed with the stages' progress, shown on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_when_done
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: list[TaskID] = [
            progress.add_task(f"stage {stage}: starting", total=1.0) for stage in range(num_stages)
        ]

        def show(message: Loading) -> None:
            progress.update(
                bars[message.stage],
                completed=message.fraction,
                description=f"stage {message.stage}: {message.phase}",
            )

        yield show


def _print_when_done(message: Loading) -> None:
    if message.fraction >= 1:
        print(f"stage {message.stage}: {message.phase} loaded", file=sys.stderr, flush=True)
