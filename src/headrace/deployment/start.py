"""Carries a deployment out: starts its ranks, and an engine that has them as its pipeline."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.deployment.cache_size import choose_num_blocks
from headrace.deployment.engine import new_engine
from headrace.deployment.hosts import HostMeeting, meet_hosts
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.model_card import ModelCard, model_card
from headrace.deployment.partition import layer_costs
from headrace.deployment.plan_table import print_plan
from headrace.deployment.recovery import Recovery
from headrace.deployment.resolve import Deployment, resolve
from headrace.engine.engine import Engine
from headrace.engine.prefill_order import PrefillOrder
from headrace.engine.recorder import Recorder
from headrace.engine.step_cost import StepCost, prior_cost
from headrace.host.memory import free_memory
from headrace.pipeline.launch import RankProcesses, bind_master
from headrace.protocol.messages import Loaded, Loading, RankConfig

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
    meeting = None if config.nnodes == 1 else meet_hosts(config, watch.check)
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
    then. May be called again, for another epoch.
    """
    began = time.monotonic()
    watch = watch or StartWatch()
    hosts = None if meeting is None else meeting.hosts
    with _rank_configs(deployment, epoch, meeting) as configs:
        processes = RankProcesses(configs, list(deployment.cpus), hosts, deployment.hosts)

    def restart(epoch: int) -> None:
        with _rank_configs(deployment, epoch, meeting) as configs:
            processes.restart(configs, num_blocks)

    try:
        # Meanwhile the stages load.
        tokenizer = deployment.model.tokenizer()
        watch.on_tokenizer(tokenizer)
        loaded = processes.wait_loaded(watch.on_progress, watch.check)
        for note in sorted({rank.note for rank in loaded if rank.note}):
            _log.warning(note)
        num_blocks = _reserve_cache(deployment, processes, loaded, meeting)
        processes.allocate_cache(num_blocks, watch.on_progress, watch.check)
        engine = new_engine(
            deployment,
            processes,
            tokenizer,
            num_blocks=num_blocks,
            epoch=epoch,
            priors=_priors(deployment, loaded),
            recorder=recorder,
            order=order,
        )
    except BaseException:
        processes.close(drain=False)
        raise
    return RunningEngine(
        engine=engine,
        recovery=Recovery(
            engine,
            processes,
            restart,
            deployment.config.max_restarts,
            deployment.config.restart_window,
        ),
        processes=processes,
        deployment=deployment,
        tokenizer=tokenizer,
        card=model_card(deployment, loaded, num_blocks, time.monotonic() - began),
    )


def rank_config(
    deployment: Deployment,
    rank: int,
    epoch: int = 0,
    *,
    master_port: int = 0,
    store_fd: int | None = None,
    meeting: HostMeeting | None = None,
) -> RankConfig:
    """What a rank is told first. master_port, store_fd: of the store where ranks meet, the latter
    on the first rank alone. meeting: of the hosts, where there are several."""
    config, model, ranks = deployment.config, deployment.model, deployment.ranks
    share = deployment.shares[ranks.stage_of(rank)]
    path, host_links = str(model.files.path.resolve()), None
    if meeting is not None:
        path, host_links = meeting.of_rank(rank, deployment.hosts, not config.insecure_links)
    return RankConfig(
        epoch=epoch,
        rank=rank,
        ranks=ranks,
        share=share,
        model_path=path,
        model_kind=model.files.kind,
        program=model.program(share),
        synthetic=model.synthetic,
        dtype=deployment.dtype,
        max_model_len=deployment.max_model_len,
        max_num_seqs=deployment.max_num_seqs,
        block_size=config.block_size,
        window=deployment.most_window,
        blocking_feedback=config.token_feedback == "blocking",
        start_timeout=deployment.start_timeout,
        link_timeout=deployment.link_timeout,
        link_backend=deployment.link_backend,
        link_emulation=config.link_emulation,
        master_addr=config.master_addr,
        master_port=master_port,
        store_fd=store_fd,
        host_links=host_links,
    )


@contextmanager
def _rank_configs(
    deployment: Deployment, epoch: int, meeting: HostMeeting | None
) -> Iterator[list[RankConfig]]:
    """What the ranks of an epoch are told; where they meet is open until this is left."""
    config = deployment.config
    ranks = range(deployment.ranks.count)
    if len(ranks) == 1 or deployment.link_backend != "gloo":
        yield [rank_config(deployment, rank, epoch, meeting=meeting) for rank in ranks]
        return
    with bind_master(config.master_addr, config.master_port) as master:
        port, store_fd = master.getsockname()[1], master.fileno()
        yield [
            rank_config(
                deployment,
                rank,
                epoch,
                master_port=port,
                store_fd=store_fd if rank == 0 else None,
            )
            for rank in ranks
        ]


def _reserve_cache(
    deployment: Deployment,
    processes: RankProcesses,
    loaded: list[Loaded],
    meeting: HostMeeting | None,
) -> int:
    """The number of cache blocks, which other engines then know of."""
    bytes_per_block = [rank.cache_bytes_per_block for rank in loaded]

    def fitting(node: int, free: int, promised: int) -> int:
        """On a host, beside what its other engines were promised."""
        ranks = zip(bytes_per_block, deployment.hosts, strict=True)
        return choose_num_blocks(
            [size for size, host in ranks if host == node],
            deployment.cache,
            block_size=deployment.config.block_size,
            max_model_len=deployment.max_model_len,
            max_num_seqs=deployment.max_num_seqs,
            free=free,
            promised=promised,
        )

    def choose(promised: int) -> int:
        fit = []
        for node in set(deployment.hosts):
            if node == 0:
                fit.append(fitting(node, free_memory(), promised))
            else:
                assert meeting is not None
                fit.append(fitting(node, *meeting.hosts.free_memory(node)))
        return min(fit)

    return processes.reserve_cache(bytes_per_block, choose)


def _priors(deployment: Deployment, loaded: list[Loaded]) -> list[StepCost]:
    """What a step is taken to cost each stage, as long as none was measured."""
    costs = layer_costs(deployment.model.sizes).layers
    return [
        # Shards compute side by side.
        prior_cost(
            max(shard.weight_bytes for shard in shards),
            sum(costs[share.first_layer : share.end_layer]) // len(shards),
        )
        for share, shards in zip(deployment.shares, deployment.ranks.by_stage(loaded), strict=True)
    ]
