"""What there is to say of a model that is served: decided at its start, for people and programs."""

from dataclasses import dataclass

from headrace.checkpoint.generation_config import SamplingDefaults
from headrace.deployment.resolve import Deployment
from headrace.protocol.messages import Loaded
from headrace.protocol.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StageCard:
    """One stage. layers: how many it runs. kernels: the path that they take. weight_bytes,
    cache_bytes: what its weights and its whole cache take."""

    layers: int
    kernels: str
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A model that is served, and how.

    name: the model's, as it was asked for. architecture: as its files call it. dtype: of weights,
    activations and cache. max_model_len: positions of the longest sequence. max_num_seqs: slots.
    block_size: positions of a block, of which the cache has num_blocks on every stage.
    prefix_caching: whether blocks are found again. sampling_defaults: what its makers recommend,
    for requests that say nothing. ranks: how many processes share it. load_s: seconds from the
    launch until it was ready. num_blocks and stages are those at the start.
    """

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    prefix_caching: bool
    sampling_defaults: SamplingDefaults
    ranks: Ranks
    stages: tuple[StageCard, ...]
    load_s: float

    @property
    def by_rank(self) -> list[StageCard]:
        """Each rank's stage."""
        return [self.stages[self.ranks.stage_of(rank)] for rank in range(self.ranks.count)]

    @property
    def line(self) -> str:
        """How the model is served, in a line for people."""
        layers = " and ".join(str(stage.layers) for stage in self.stages)
        cache = max(stage.cache_bytes for stage in self.stages)
        count, shards = len(self.stages), self.ranks.num_shards
        of_shards = f" of {shards} shards" * (shards > 1)
        return (
            f"{self.dtype}, {count} stage{'s' * (count > 1)}{of_shards} with {layers} layers, "
            f"{self.stages[0].kernels} kernels, "
            f"cache for {self.num_blocks * self.block_size} tokens "
            f"({cache / 2**20:.0f} MiB a stage), at most {self.max_model_len} tokens a sequence, "
            f"{self.max_num_seqs} sequences at once"
        )


def model_card(
    deployment: Deployment, loaded: list[Loaded], num_blocks: int, load_s: float
) -> ModelCard:
    """The card of a deployment that was started. loaded: what each rank said of its weights."""
    config, model = deployment.config, deployment.model
    return ModelCard(
        name=config.model,
        architecture=model.sizes.architecture,
        dtype=deployment.dtype,
        vocab_size=model.sizes.vocab_size,
        max_model_len=deployment.max_model_len,
        max_num_seqs=deployment.max_num_seqs,
        block_size=config.block_size,
        num_blocks=num_blocks,
        prefix_caching=config.enable_prefix_caching,
        sampling_defaults=model.sampling_defaults,
        ranks=deployment.ranks,
        stages=tuple(
            StageCard(
                layers=share.num_layers,
                kernels=shards[0].kernels,
                weight_bytes=sum(shard.weight_bytes for shard in shards),
                cache_bytes=sum(shard.cache_bytes_per_block for shard in shards) * num_blocks,
            )
            for share, shards in zip(
                deployment.shares, deployment.ranks.by_stage(loaded), strict=True
            )
        ),
        load_s=load_s,
    )
