"""Carries a deployment out: starts its ranks, and an engine that has them as its pipeline."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.deployment.engine import new_engine
from headrace.deployment.first_start import bring_up, check_hosts
from headrace.deployment.hosts import HostMeeting, meet_hosts
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.model_card import ModelCard, model_card
from headrace.deployment.plan_table import print_plan
from headrace.deployment.rank_setup import rank_configs, reserve_cache, step_priors
from headrace.deployment.rebuild import Rebuild
from headrace.deployment.recovery import Recovery
from headrace.deployment.resolve import Deployment, resolve
from headrace.deployment.restart_limit import RestartLimit
from headrace.engine.engine import Engine
from headrace.engine.prefill_order import PrefillOrder
from headrace.engine.recorder import Recorder
from headrace.errors import UsageError
from headrace.pipeline.launch import RankProcesses
from headrace.protocol.messages import Loaded, Loading

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartWatch:
    """What is called while an engine starts; whatever check and on_tokenizer raise ends the start.

    on_progress: told how far the stages are. check: once a second or more often. on_tokenizer:
    given the tokenizer while the stages load.
    """

    on_progress: Callable[[Loading], None] = lambda _: None
    check: Callable[[], None] = lambda: None
    on_tokenizer: Callable[[Tokenizer], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class RunningEngine:
    """An engine that is ready. recovery: steps it, and has its ranks started anew when they die.
    card: what there is to say of it."""

    engine: Engine
    recovery: Recovery
    processes: RankProcesses
    deployment: Deployment
    tokenizer: Tokenizer
    card: ModelCard


def launch(
    config: EngineConfig,
    watch: StartWatch | None = None,
    recorder: Recorder | None = None,
    order: PrefillOrder | None = None,
) -> RunningEngine:
    """Read the model's files, decide everything and start the first epoch.

    recorder: told what the engine plans and what comes of it. order: whose prefill goes first, None
    for the scheduler's own. Raises UsageError, ModelError, StartError or PipelineError; no process
    is left behind then.
    """
    began = time.monotonic()
    watch = watch or StartWatch()
    meeting = _meeting(config, watch.check)
    cluster = read_machine() if meeting is None else meeting.cluster
    try:
        deployment = resolve(config, read_model(config), cluster)
        if meeting is not None:
            print_plan(deployment, sys.stderr)
        running = start(deployment, watch=watch, recorder=recorder, order=order, meeting=meeting)
    except BaseException:
        if meeting is not None:
            meeting.hosts.close()
        raise
    return replace(running, card=replace(running.card, load_s=time.monotonic() - began))


def _meeting(config: EngineConfig, check: Callable[[], None]) -> HostMeeting | None:
    """Of the hosts, where there are several."""
    if config.distributed_executor_backend == "ray":
        try:
            # Only here, since nobody else needs it.
            from headrace.deployment.ray_hosts import meet_hosts_on_ray
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "ray":
                raise
            raise UsageError(
                "--distributed-executor-backend ray needs Ray, which is not installed: "
                "pip install 'headrace[ray]'"
            ) from error
        return meet_hosts_on_ray(config, check)
    return None if config.nnodes == 1 else meet_hosts(config, check)


def start(
    deployment: Deployment,
    epoch: int = 0,
    watch: StartWatch | None = None,
    recorder: Recorder | None = None,
    order: PrefillOrder | None = None,
    meeting: HostMeeting | None = None,
) -> RunningEngine:
    """Bring up the stages and an engine for one epoch, and wait until they are ready.

    meeting: of the hosts, where there are several.

    Raises ModelError, StartError or PipelineError, and what watch raises; no process is left behind
    then. May be called again, for another epoch. The epoch is a later one if ranks had to be
    started anew meanwhile.
    """
    began = time.monotonic()
    watch = watch or StartWatch()
    hosts = None if meeting is None else meeting.hosts
    config = deployment.config
    limit = RestartLimit(config.max_restarts, config.restart_window)
    num_blocks: int | None = None
    with rank_configs(deployment, epoch, meeting) as configs:
        processes = RankProcesses(configs, list(deployment.cpus), hosts, deployment.hosts)

    def restart(epoch: int) -> None:
        with rank_configs(deployment, epoch, meeting) as configs:
            processes.restart(configs, num_blocks)

    def check() -> None:
        watch.check()
        if hosts is not None:
            check_hosts(hosts.away(), deployment)

    def wait_ready() -> tuple[list[Loaded], int]:
        nonlocal num_blocks
        loaded = processes.wait_loaded(watch.on_progress, check)
        if num_blocks is None:
            num_blocks = reserve_cache(deployment, processes, loaded, meeting)
        processes.allocate_cache(num_blocks, watch.on_progress, check)
        return loaded, num_blocks

    try:
        # Meanwhile the stages load.
        tokenizer = deployment.model.tokenizer()
        watch.on_tokenizer(tokenizer)
        (loaded, num_blocks), epoch = bring_up(wait_ready, restart, processes, limit, epoch)
        for note in sorted({rank.note for rank in loaded if rank.note}):
            _log.warning(note)
        engine = new_engine(
            deployment,
            processes,
            tokenizer,
            num_blocks=num_blocks,
            epoch=epoch,
            priors=step_priors(deployment, loaded),
            recorder=recorder,
            order=order,
        )
    except BaseException:
        processes.close(drain=False)
        raise
    return RunningEngine(
        engine=engine,
        recovery=Recovery(
            engine, processes, Rebuild(engine, processes, deployment, meeting, num_blocks), limit
        ),
        processes=processes,
        deployment=deployment,
        tokenizer=tokenizer,
        card=model_card(deployment, loaded, num_blocks, time.monotonic() - began),
    )
