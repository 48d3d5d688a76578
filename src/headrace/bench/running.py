"""An engine that is up for as long as a bench measures it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.config import EngineConfig
from headrace.deployment.start import RunningEngine, StartWatch, launch
from headrace.engine.prefill_order import PrefillOrder
from headrace.engine.recorder import Recorder


@contextmanager
def running_engine(
    config: EngineConfig,
    say: Callable[[str], None],
    name: str = "",
    recorder: Recorder | None = None,
    order: PrefillOrder | None = None,
) -> Iterator[RunningEngine]:
    """Ended afterwards: in order, or at once after an error. say: told how it loads.

    name: of the pipeline, where there are several. recorder, order: as launch() takes them. Raises
    what launch() raises.
    """
    prefix = f"{name} pipeline: " if name else ""
    watch = StartWatch(
        on_progress=lambda m: say(
            f"{prefix}{config.ranks.name(m.rank)}, {m.phase} {m.fraction:.0%}"
        )
    )
    running = launch(config, watch, recorder, order)
    try:
        yield running
    except BaseException:
        running.processes.close(drain=False)
        raise
    running.processes.close(drain=True)
