"""Which stage runs which layers: contiguous shares whose dearest is as cheap as possible."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, combinations

from headrace.errors import UsageError
from headrace.protocol.model_config import ModelSizes, StageShare

# Of this many tokens that pass the layers one is sampled, and so passes the output projection too:
# between chats, with as many tokens in as out, and summaries, with some five in for one out.
_TOKENS_A_SAMPLE = 3


@dataclass(frozen=True)
class LayerCosts:
    """Relative cost of a token in a step's parts: products of elements. layers: of each.

    The embedding is a gather of one row a token, so it costs next to nothing; the output projection
    multiplies its whole matrix, but only for tokens that are sampled.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int


def layer_costs(sizes: ModelSizes) -> LayerCosts:
    """Costs of a model's parts."""
    return LayerCosts(
        layers=tuple(layer.products for layer in sizes.layers),
        embedding=sizes.embedding_products,
        head=sizes.head_products // _TOKENS_A_SAMPLE,
    )


def balanced_layers(num_stages: int, costs: LayerCosts) -> list[int]:
    """Layers per stage, at least one each, with the smallest possible dearest stage.

    Exact: tries the bounds that can occur. Among equals, earlier stages get fewer layers, since
    they start first and a lighter first stage fills the pipeline sooner.
    """
    num_layers = len(costs.layers)
    check_stage_count(num_layers, num_stages)
    # Of the layers before each.
    before = list(accumulate(costs.layers, initial=0))

    def fixed(stage: int) -> int:
        return costs.embedding * (stage == 0) + costs.head * (stage == num_stages - 1)

    def fill(bound: int) -> list[int] | None:
        shares, left = [0] * num_stages, num_layers
        for stage in range(num_stages - 1, -1, -1):
            room = bound - fixed(stage)
            # Those before it need a layer each.
            first = max(stage, bisect_left(before, before[left] - room))
            if first >= left:
                return None
            shares[stage], left = left - first, first
        return shares if left == 0 else None

    bounds = sorted(
        {
            fixed(stage) + before[end] - before[first]
            for stage in range(num_stages)
            for first, end in combinations(range(num_layers + 1), 2)
        }
    )
    # Whatever fits a bound fits a larger one.
    shares = fill(bounds[bisect_left(bounds, True, key=lambda bound: fill(bound) is not None)])
    assert shares is not None
    return shares


def check_stage_count(num_layers: int, num_stages: int) -> None:
    """Raises UsageError if some stage would have no layer."""
    if num_stages > num_layers:
        raise UsageError(
            f"--pipeline-parallel-size {num_stages} is more than the model's {num_layers} "
            "layers: every stage needs at least one"
        )


def parse_layer_partition(text: str, num_layers: int, num_stages: int) -> list[int]:
    """Layers per stage from a list such as "19,11"; raises UsageError if it does not fit."""
    try:
        shares = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--layer-partition {text!r} is not a list of whole numbers such as 19,11"
        ) from None
    if len(shares) != num_stages:
        raise UsageError(
            f"--layer-partition {text} is for {len(shares)} stages, "
            f"--pipeline-parallel-size is {num_stages}"
        )
    if min(shares) < 1:
        raise UsageError(f"--layer-partition {text}: every stage needs at least one layer")
    if sum(shares) != num_layers:
        raise UsageError(
            f"--layer-partition {text} adds up to {sum(shares)}, the model has {num_layers} layers"
        )
    return shares


def stage_shares(layers_per_stage: list[int]) -> list[StageShare]:
    """The shares that a list of layer counts describes."""
    shares, first = [], 0
    for stage, count in enumerate(layers_per_stage):
        last = stage == len(layers_per_stage) - 1
        shares.append(StageShare(first, first + count, embeds=stage == 0, samples=last))
        first += count
    return shares
