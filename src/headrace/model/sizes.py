"""What a program costs, in numbers that everybody may know."""

from collections.abc import Iterable, Mapping

from headrace.model.architecture import Design
from headrace.model.stored_form import stored_bytes
from headrace.protocol.model_config import LayerSize, ModelSizes, StageShare, StoredSize
from headrace.protocol.program import Embed, Experts, Linear, Matrix, Operation, Program, Rotate


def model_sizes(
    architecture: str,
    design: Design,
    dtype: str,
    eos_token_ids: tuple[int, ...],
    kinds: Mapping[str, str] | None = None,
) -> ModelSizes:
    """The sizes of a design whose tensors are there. dtype: the weights' own. kinds: of quantized
    ones, see quantized_kinds()."""
    kinds = kinds or {}
    decoder = design.decoder
    layers = [
        design.program(StageShare(number, number + 1, embeds=False, samples=False))
        for number in range(decoder.num_layers)
    ]
    ends = design.program(StageShare(0, 0, embeds=True, samples=True))
    tables = [each.table for each in ends.operations if isinstance(each, Embed)]
    return ModelSizes(
        architecture=architecture,
        vocab_size=ends.vocab_size,
        hidden_size=ends.hidden_size,
        layers=tuple(_layer_size(layer, kinds) for layer in layers),
        rotation_elements=sum(head_dim for *_, head_dim in set().union(*map(_rotations, layers))),
        # A gather of one row a token.
        embedding_products=sum(table.shape[1] for table in tables),
        head_products=_products(ends.head),
        max_positions=decoder.max_positions,
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        embedding_stored=_stored((Matrix((table,)) for table in tables), kinds),
        head_stored=_stored(_matrices(ends.head), kinds),
        tied=any(Matrix((table,)) in _matrices(ends.head) for table in tables),
    )


def _layer_size(layer: Program, kinds: Mapping[str, str]) -> LayerSize:
    kept = sum(2 * cache.kv_heads * cache.head_dim for cache in layer.caches)
    products = _products(layer.operations)
    stored = _stored(_matrices(layer.operations), kinds)
    mixtures = [each for each in layer.operations if isinstance(each, Experts)]
    if not mixtures:
        return LayerSize(products, kept, stored=stored)
    # As many of each in a model's layer as there are, they are of one kind.
    own = sum(each.chosen * (_size(each.gate_up) + _size(each.down)) for each in mixtures)
    missed = 1 - mixtures[0].chosen / mixtures[0].count
    return LayerSize(products + own, kept, own, missed, stored)


def _products(operations: tuple[Operation, ...]) -> int:
    """Of elements, for a row, by what all rows pass."""
    return sum(map(_size, _matrices(operations)))


def _matrices(operations: tuple[Operation, ...]) -> list[Matrix]:
    """Those that all rows pass."""
    return [each.weight for each in operations if isinstance(each, Linear)]


def _stored(matrices: Iterable[Matrix], kinds: Mapping[str, str]) -> StoredSize:
    numbers = total = 0
    for matrix in matrices:
        nbytes = stored_bytes(matrix, kinds)
        if nbytes is not None:
            numbers, total = numbers + _size(matrix), total + nbytes
    return StoredSize(numbers, total)


def _size(matrix: Matrix) -> int:
    return matrix.outs * matrix.ins


def _rotations(layer: Program) -> set[tuple[object, object, int]]:
    """The tables that the layer needs: cos and sin of half a head's width each."""
    return {
        (each.rope, each.factors, layer.caches[each.cache].head_dim)
        for each in layer.operations
        if isinstance(each, Rotate) and each.rope is not None
    }
