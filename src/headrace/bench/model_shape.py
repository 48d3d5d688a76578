"""The sizes of a model's kernels, from its program."""

import msgspec

from headrace.errors import UsageError
from headrace.protocol.model_config import RopeConfig
from headrace.protocol.program import (
    Attention,
    Experts,
    GatedActivation,
    Linear,
    Norm,
    Program,
    Rotate,
)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's kernels, and the head's. window: in positions, None for all. products: outputs and
    inputs of each, by label."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rms_norm_epsilon: float
    rope: RopeConfig
    products: dict[str, tuple[int, int]]


def shape_of(program: Program) -> ModelShape:
    """The shape of a whole model's first layer, and of its head.

    Raises UsageError for a model with experts, whose kernels have no case among those measured.
    """
    found = {type(operation): operation for operation in reversed(program.operations)}
    if Experts in found:
        raise UsageError("the model has experts, whose kernels are not measured: use another model")
    attention, rotation, norm = found[Attention], found[Rotate], found[Norm]
    activation = found[GatedActivation]
    assert isinstance(attention, Attention)
    assert isinstance(rotation, Rotate)
    assert isinstance(norm, Norm)
    assert isinstance(activation, GatedActivation)
    assert rotation.rope is not None
    cache = program.caches[attention.cache]
    products = {
        operation.label: (operation.weight.outs, operation.weight.ins)
        for operation in (*program.operations, *program.head)
        if isinstance(operation, Linear)
    }
    return ModelShape(
        vocab_size=program.vocab_size,
        hidden_size=program.hidden_size,
        intermediate_size=program.widths[activation.out],
        num_heads=attention.heads,
        num_kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        window=attention.window,
        rms_norm_epsilon=norm.epsilon,
        rope=rotation.rope,
        products=products,
    )
