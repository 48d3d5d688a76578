"""What the stages' weights and caches take of memory, foretold from a model's sizes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.model_config import ModelSizes, StageShare, StoredSize

Bytes = NDArray[np.float64]

# Of memory that is free now, what is left to activations, to loading and to everybody else.
KEPT_FREE = 0.2


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes that parts of a model take. A stage's are those of its layers and ends, and per_stage.

    layers, embedding, head: weights. shared: bytes of the head that are the embedding's, where one
    stage has both. caches: of each layer, what the longest sequence takes.
    per_stage: what a stage keeps besides. cache_per_stage: what a stage's whole cache takes if it
    was said, instead of the layers'. cache_share: of what the weights leave free, the part that the
    cache may take.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    shared: int = 0
    caches: tuple[int, ...]
    per_stage: int
    cache_per_stage: int | None
    cache_share: float

    def weights(self, share: StageShare) -> int:
        """Bytes of the weights of a stage."""
        return (
            sum(self.layers[share.first_layer : share.end_layer])
            + self.embedding * share.embeds
            + self.head * share.samples
            - self.shared * (share.embeds and share.samples)
        )

    def cache(self, share: StageShare) -> int:
        """Bytes of the least cache of a stage."""
        if self.cache_per_stage is not None:
            return self.cache_per_stage
        return sum(self.caches[share.first_layer : share.end_layer])

    def free(self, weights: Bytes, cache: Bytes) -> Bytes:
        """Bytes that must be free for so many of weights and of cache, host by host."""
        return np.ceil(
            np.maximum((weights + cache) / (1 - KEPT_FREE), weights + cache / self.cache_share)
        )


def memory_need(
    sizes: ModelSizes,
    *,
    element_size: int,
    stored: bool,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    cache_per_stage: int | None,
    cache_share: float,
) -> MemoryNeed:
    """What a model needs. element_size: bytes of a number of weights and cache. stored: whether
    quantized weights stay as they are.

    Columns that shards have of them may not (model/stored_form.py): that is not foretold.
    Vectors, such as norms' weights, are left out: they are less than a thousandth.
    """
    blocks = -(-max_model_len // block_size)
    rotations = 4 * sizes.rotation_elements * max_model_len

    def held(numbers: int, own: StoredSize) -> int:
        return (
            own.nbytes + (numbers - own.numbers) * element_size
            if stored
            else numbers * element_size
        )

    table = sizes.vocab_size * sizes.hidden_size
    shared = sizes.tied and stored
    return MemoryNeed(
        layers=tuple(held(layer.weights, layer.stored) for layer in sizes.layers),
        embedding=held(table, sizes.embedding_stored),
        head=held(sizes.head_products, sizes.head_stored),
        # Otherwise a table is not packed as a product's weight is.
        shared=sizes.embedding_stored.nbytes if shared else 0,
        caches=tuple(
            layer.cache_elements * element_size * blocks * block_size for layer in sizes.layers
        ),
        # Tables of rotations, and of the slots' blocks.
        per_stage=rotations + 8 * blocks * max_num_seqs,
        cache_per_stage=cache_per_stage,
        cache_share=cache_share,
    )


def gib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / 2**30:.3g} GiB"
