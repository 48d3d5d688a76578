"""What a program costs, in numbers that everybody may know."""

from headrace.model.architecture import Design
from headrace.protocol.model_config import LayerSize, ModelSizes, StageShare
from headrace.protocol.program import Embed, Experts, Linear, Matrix, Operation, Program, Rotate


def model_sizes(
    architecture: str, design: Design, dtype: str, eos_token_ids: tuple[int, ...]
) -> ModelSizes:
    """The sizes of a design whose tensors are there. dtype: the weights' own."""
    decoder = design.decoder
    layers = [
        design.program(StageShare(number, number + 1, embeds=False, samples=False))
        for number in range(decoder.num_layers)
    ]
    ends = design.program(StageShare(0, 0, embeds=True, samples=True))
    return ModelSizes(
        architecture=architecture,
        vocab_size=ends.vocab_size,
        hidden_size=ends.hidden_size,
        layers=tuple(_layer_size(layer) for layer in layers),
        rotation_elements=sum(head_dim for *_, head_dim in set().union(*map(_rotations, layers))),
        embedding_products=_embedded(ends),
        head_products=_products(ends.head),
        max_positions=decoder.max_positions,
        dtype=dtype,
        eos_token_ids=eos_token_ids,
    )


def _layer_size(layer: Program) -> LayerSize:
    kept = sum(2 * cache.kv_heads * cache.head_dim for cache in layer.caches)
    products = _products(layer.operations)
    mixtures = [each for each in layer.operations if isinstance(each, Experts)]
    if not mixtures:
        return LayerSize(products, kept)
    # As many of each in a model's layer as there are, they are of one kind.
    own = sum(each.chosen * (_size(each.gate_up) + _size(each.down)) for each in mixtures)
    missed = 1 - mixtures[0].chosen / mixtures[0].count
    return LayerSize(products + own, kept, own, missed)


def _products(operations: tuple[Operation, ...]) -> int:
    """Of elements, for a row, by what all rows pass."""
    return sum(_size(each.weight) for each in operations if isinstance(each, Linear))


def _size(matrix: Matrix) -> int:
    return matrix.outs * matrix.ins


def _embedded(ends: Program) -> int:
    """A gather of one row a token."""
    return sum(each.table.shape[1] for each in ends.operations if isinstance(each, Embed))


def _rotations(layer: Program) -> set[tuple[object, object, int]]:
    """The tables that the layer needs: cos and sin of half a head's width each."""
    return {
        (each.rope, each.factors, layer.caches[each.cache].head_dim)
        for each in layer.operations
        if isinstance(each, Rotate) and each.rope is not None
    }
