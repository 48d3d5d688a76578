"""What /metrics shows: requests as they go, the engine's state, and this process."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from headrace.deployment.model_card import ModelCard
from headrace.deployment.recovery import RecoveryStatus
from headrace.engine.snapshot import EngineSnapshot
from headrace.sampling_params import SamplingParams
from headrace.serving.metrics_engine import EngineState
from headrace.serving.metrics_requests import RequestTotals, RequestWatch


class ServerMetrics:
    """All metrics of one server, in a registry of its own.

    Names begin with `headrace:` and go on as vLLM's where the meaning is the same. Labels are the
    model's name, stages, their shards and finish reasons: nothing that a client sends. Metrics of
    the process (process_cpu_seconds_total and others) are of this one, not of the ranks'. clock:
    seconds, for the busy fraction.
    """

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = RequestTotals(model_name, self._registry)
        self._engine = EngineState(model_name, clock)
        self._registry.register(self._engine)

    def attach(
        self,
        card: ModelCard,
        snapshot: Callable[[], EngineSnapshot],
        recovery: Callable[[], RecoveryStatus] = RecoveryStatus,
    ) -> None:
        """Show the engine's state from now on, also when it has ended. snapshot, recovery: give its
        newest."""
        self._engine.attach(card, snapshot, recovery)

    def begin(self, prompt_tokens: int, params: SamplingParams) -> RequestWatch:
        """Watch a request that is given to the engine; its prompt has so many tokens."""
        return RequestWatch(self._requests, prompt_tokens, params)

    def refused(self, status: int) -> None:
        """A request was answered by an error of this HTTP status."""
        self._requests.refused(status)

    def cut(self) -> None:
        """An answer was cut because its reader was too slow."""
        self._requests.cut.inc()

    def sample(self) -> None:
        """To be called about once a second: how busy ranks are is measured between calls."""
        self._engine.sample()

    def render(self) -> tuple[bytes, str]:
        """All metrics in the text format that every scraper takes, and its media type."""
        # Not OpenMetrics, whatever is asked for: there the library (0.26, its issue 1177) makes the
        # colon in names an underscore, but only in some places.
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
