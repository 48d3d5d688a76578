"""An engine whose stages exist in virtual time only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.deployment.engine import new_engine
from headrace.deployment.machine import read_machine
from headrace.deployment.model import read_model
from headrace.deployment.model_card import ModelCard, model_card
from headrace.deployment.resolve import Deployment, resolve
from headrace.engine.engine import Engine
from headrace.errors import UsageError
from headrace.protocol.messages import LinkEmulation, Loaded

if TYPE_CHECKING:
    from headrace.simulation.virtual_links import VirtualClock
    from headrace.simulation.virtual_stages import VirtualStages


@dataclass(frozen=True, kw_only=True)
class VirtualEngine:
    """An engine whose stages exist in virtual time only. clock: theirs."""

    engine: Engine
    stages: "VirtualStages"
    deployment: Deployment
    clock: "VirtualClock"
    card: ModelCard


def launch_virtual(config: EngineConfig) -> VirtualEngine:
    """Decide everything for a synthetic model, and start it in virtual time.

    Raises UsageError, also for a real model.
    """
    return start_virtual(resolve(config, read_model(config), read_machine()))


def start_virtual(deployment: Deployment) -> VirtualEngine:
    """An engine on a clock that moves only while the engine waits.

    Links take what the config's emulation says, and no time without; plans and results take none.
    Raises UsageError for a real model.
    """
    # Stages in this very process need torch, which takes seconds to import: not for real ones.
    import torch

    from headrace.execution.synthetic_executor import SyntheticExecutor
    from headrace.simulation.virtual_links import VirtualClock, VirtualNetwork
    from headrace.simulation.virtual_stages import VirtualStages

    config, model = deployment.config, deployment.model
    if model.synthetic is None:
        raise UsageError(f"{config.model} cannot run in virtual time: only synthetic models can")
    emulation = config.link_emulation or LinkEmulation()
    clock = VirtualClock()
    network = VirtualNetwork(
        clock, deployment.ranks, lambda _: emulation.latency_s, emulation.bytes_per_s
    )
    executor = SyntheticExecutor(
        model.synthetic,
        model.sizes.hidden_size,
        getattr(torch, deployment.dtype),
        real_time=False,
    )
    stages = VirtualStages(
        clock,
        network,
        [executor] * deployment.ranks.count,
        deployment.most_window,
        deployment.max_num_seqs,
        num_shards=deployment.ranks.num_shards,
        blocking_feedback=config.token_feedback == "blocking",
        compute_s=lambda rank, plan, kind: executor.seconds(plan) if kind == "forward" else 0.0,
    )
    blocks = -(-deployment.max_model_len // config.block_size) * deployment.max_num_seqs
    engine = new_engine(
        deployment,
        stages,
        model.tokenizer(),
        num_blocks=blocks,
        epoch=0,
        clock=lambda: clock.now,
    )
    loaded = [Loaded(0, rank, 0, 0, "no", None, []) for rank in range(deployment.ranks.count)]
    card = model_card(deployment, loaded, blocks, load_s=0.0)
    return VirtualEngine(
        engine=engine, stages=stages, deployment=deployment, clock=clock, card=card
    )
