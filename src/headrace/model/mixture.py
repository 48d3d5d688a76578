"""Layers whose inner part is a mixture of experts: what architectures put together for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.gguf_metadata import GgufMetadata
from headrace.checkpoint.plausible import check_sizes
from headrace.errors import ModelError
from headrace.model import decoder
from headrace.model.blocks import product
from headrace.model.decoder import Decoder, stored_name
from headrace.protocol.program import Experts, Linear, Matrix, Operation, Route
from headrace.protocol.stored_tensor import Stack, StoredTensor

# What families' configurations say of training, and of what else a model returns.
IGNORED_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef"})


@dataclass(frozen=True, kw_only=True)
class Names:
    """Of tensors inside a layer, Hugging Face's, {} for an expert's number."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"

    @property
    def in_gguf(self) -> Mapping[str, str]:
        """GGUF's, of all inside a layer; a tensor there is of all experts."""
        return {
            **decoder.GGUF_NAMES,
            self.router: "ffn_gate_inp",
            self.gate: "ffn_gate_exps",
            self.up: "ffn_up_exps",
            self.down: "ffn_down_exps",
        }


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """count: experts; chosen: those of a row; inner: width of each. normalized: as of Route."""

    count: int
    chosen: int
    inner: int
    normalized: bool
    names: Names = Names()

    @property
    def widths(self) -> dict[str, int]:
        """Of the buffers that its operations need."""
        return {"scores": self.count}


def checked(path: Path, mixture: Mixture) -> Mixture:
    """The mixture, if its numbers make sense; raises ModelError."""
    check_sizes(
        path,
        {
            "number of experts": mixture.count,
            "number of experts a token": mixture.chosen,
            "width of an expert": mixture.inner,
        },
    )
    if mixture.chosen > mixture.count:
        raise ModelError(
            f"model {path}: a token's {mixture.chosen} experts are more than the "
            f"{mixture.count} that there are"
        )
    return mixture


def mixture_from_gguf(
    metadata: GgufMetadata, *, normalized: bool, names: Names | None = None
) -> Mixture:
    """The experts of a GGUF file; defaults are llama.cpp's. Raises ModelError as checked() does."""
    chosen = metadata.get("expert_used_count", int)
    inner = metadata.get("expert_feed_forward_length", int, 0)
    mixture = Mixture(
        count=metadata.get("expert_count", int),
        chosen=chosen,
        inner=inner or metadata.get("feed_forward_length", int),
        normalized=normalized,
        names=names or Names(),
    )
    return checked(metadata.path, mixture)


def experts(sizes: Decoder, at: str, mixture: Mixture) -> list[Operation]:
    """Router and experts of the normed rows, to delta."""
    hidden, inner, count, names = sizes.hidden_size, mixture.inner, mixture.count, mixture.names

    def stored(name: str, outs: int, ins: int) -> StoredTensor:
        stack = Stack(count) if sizes.in_gguf else None
        return StoredTensor(
            f"{stored_name(sizes, f'{at}.{name}')}.weight", (outs, ins), stack=stack
        )

    router = product(sizes, [f"{at}.{names.router}"], [count], hidden)
    gate_up = stored(names.gate, inner, hidden), stored(names.up, inner, hidden)
    down = stored(names.down, hidden, inner)
    return mixture_operations(mixture, router, Matrix(gate_up), Matrix((down,)), "silu")


def mixture_operations(
    mixture: Mixture, router: Matrix, gate_up: Matrix, down: Matrix, activation: str
) -> list[Operation]:
    """Router and experts with these weights, from normed to delta."""
    count, chosen = mixture.count, mixture.chosen
    return [
        Linear("normed", router, "scores", "router"),
        Route("scores", chosen, mixture.normalized),
        Experts("normed", "scores", count, chosen, gate_up, down, activation, "delta"),
    ]
