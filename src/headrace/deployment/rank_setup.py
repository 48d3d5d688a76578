"""What a deployment means for its ranks: what each is told, may take of memory, and should cost."""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.deployment.cache_size import choose_num_blocks
from headrace.deployment.hosts import HostMeeting
from headrace.deployment.partition import layer_costs
from headrace.deployment.resolve import Deployment
from headrace.engine.step_cost import StepCost, prior_cost
from headrace.host.memory import free_memory
from headrace.model.shards import shard_program
from headrace.pipeline.launch import RankProcesses
from headrace.pipeline.store_socket import bind_master
from headrace.protocol.messages import Loaded, RankConfig
from headrace.protocol.model_config import ModelSizes, StageShare


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
    host_links = None
    if meeting is not None:
        host_links = meeting.links_of(rank, deployment.hosts, not config.insecure_links)
    return RankConfig(
        epoch=epoch,
        rank=rank,
        ranks=ranks,
        share=share,
        model_path=str(model.files.path.resolve()),
        model_kind=model.files.kind,
        program=shard_program(model.program(share), ranks.shard_of(rank), ranks.num_shards),
        synthetic=model.synthetic,
        dtype=deployment.dtype,
        weights=deployment.weights,
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
def rank_configs(
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


def reserve_cache(
    deployment: Deployment,
    processes: RankProcesses,
    loaded: list[Loaded],
    meeting: HostMeeting | None,
) -> int:
    """The number of cache blocks, which other engines then know of."""
    bytes_per_block = [rank.cache_bytes_per_block for rank in loaded]
    by_stage = deployment.ranks.by_stage(list(zip(bytes_per_block, deployment.hosts, strict=True)))

    def fitting(node: int, free: int, promised: int) -> int:
        """On a host, beside what its other engines were promised."""
        here = [[size for size, host in shards if host == node] for shards in by_stage]
        return choose_num_blocks(
            [sum(sizes) for sizes in here if sizes],
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
                there = meeting.hosts.free_memory(node)
                fit.append(fitting(node, there.free, there.promised))
        return min(fit)

    return processes.reserve_cache(bytes_per_block, choose)


def step_priors(deployment: Deployment, loaded: list[Loaded]) -> list[StepCost]:
    """What a step is taken to cost each stage, as long as none was measured."""
    sizes = deployment.model.sizes
    costs = layer_costs(sizes).layers
    priors = []
    for share, shards in zip(deployment.shares, deployment.ranks.by_stage(loaded), strict=True):
        layers = slice(share.first_layer, share.end_layer)
        # Shards compute side by side.
        weight_bytes = max(shard.weight_bytes for shard in shards)
        priors.append(
            prior_cost(
                weight_bytes,
                sum(costs[layers]) // len(shards),
                round(weight_bytes * _expert_part(sizes, share)),
                max((layer.missed for layer in sizes.layers[layers]), default=0.0),
            )
        )
    return priors


def _expert_part(sizes: ModelSizes, share: StageShare) -> float:
    """How much of a stage's weights are experts'."""
    layers = sizes.layers[share.first_layer : share.end_layer]
    experts = sum(layer.expert_weights for layer in layers)
    weights = sum(layer.weights for layer in layers) + sizes.head_products * share.samples
    weights += sizes.vocab_size * sizes.hidden_size * share.embeds
    return experts / max(1, weights)
