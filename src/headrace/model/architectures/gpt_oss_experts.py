"""Where files of GPT-OSS have its experts: in one tensor of all, each kind of file otherwise."""

from msgspec.structs import replace

from headrace.model.blocks import product
from headrace.model.decoder import Decoder, stored_name
from headrace.model.mixture import Mixture, Names, mixture_operations
from headrace.protocol.program import Matrix, Operation
from headrace.protocol.stored_tensor import Stack, StoredTensor

# GGUF's names follow from them; those of a directory are below.
NAMES = Names(router="mlp.router", gate="experts.gate", up="experts.up", down="experts.down")


def experts(sizes: Decoder, at: str, mixture: Mixture, mxfp4: bool) -> list[Operation]:
    """Router and experts of the normed rows, to delta. mxfp4: how a directory holds weights."""
    hidden, inner, count = sizes.hidden_size, mixture.inner, mixture.count

    def weight_and_bias(part: str, outs: int, ins: int) -> tuple[StoredTensor, StoredTensor]:
        if sizes.in_gguf:
            name, stack = stored_name(sizes, f"{at}.experts.{part}"), Stack(count)
            return (
                StoredTensor(f"{name}.weight", (outs, ins), stack=stack),
                StoredTensor(f"{name}.bias", (outs,), stack=stack),
            )
        # Rows of gate and up take turns.
        name, stack = f"{at}.mlp.experts.down_proj", Stack(count)
        if part != "down":
            name, stack = f"{at}.mlp.experts.gate_up_proj", Stack(count, 0, 2, int(part == "up"))
        own = replace(stack, mxfp4=True) if mxfp4 else replace(stack, transposed=True)
        return (
            StoredTensor(name, (outs, ins), stack=own),
            StoredTensor(f"{name}_bias", (outs,), stack=stack),
        )

    gate, gate_bias = weight_and_bias("gate", inner, hidden)
    up, up_bias = weight_and_bias("up", inner, hidden)
    down, down_bias = weight_and_bias("down", hidden, inner)
    router = product(sizes, [f"{at}.{NAMES.router}"], [count], hidden, biased=True)
    gate_up, down_matrix = Matrix((gate, up), (gate_bias, up_bias)), Matrix((down,), (down_bias,))
    return mixture_operations(mixture, router, gate_up, down_matrix, "clamped_swiglu")
