"""What a model is made of, independent of the files that say so."""

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base frequency and how it is stretched for long contexts.

    kind: default, linear, llama3 or yarn, with Hugging Face's names for the parameters. scale: a
    further factor on cos and sin, of any kind.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    scale: float = 1.0


class StageShare(msgspec.Struct, frozen=True):
    """One stage's part of the model: layers first_layer up to, not including, end_layer."""

    first_layer: int
    end_layer: int
    embeds: bool
    samples: bool

    @property
    def num_layers(self) -> int:
        """How many transformer layers the stage runs."""
        return self.end_layer - self.first_layer


class LayerSize(msgspec.Struct, frozen=True, array_like=True):
    """products: multiplications of elements for a token that passes the layer, attention's over the
    context apart. cache_elements: what it keeps of each position, keys and values."""

    products: int
    cache_elements: int


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What all but the architecture itself may know of a model: numbers.

    architecture: its name for people. rotation_elements: of tables that a stage keeps for each
    position. embedding_products, head_products: for a token that passes them. dtype: the
    checkpoint's own ("float32", "bfloat16", "float16"). max_positions: the longest context it was
    made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSize, ...]
    rotation_elements: int
    embedding_products: int
    head_products: int
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self.layers)
