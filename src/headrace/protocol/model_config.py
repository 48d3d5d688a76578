"""What a model is made of, independent of the files that say so."""

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base frequency and how it is stretched for long contexts.

    kind: default, linear, llama3, yarn or longrope, with Hugging Face's names for the parameters.
    scale: a further factor on cos and sin, of any kind. short_factors, long_factors: longrope's
    divisors of the frequencies, for sequences of up to original_max_positions and for longer ones.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


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


class StoredSize(msgspec.Struct, frozen=True, array_like=True):
    """Of weights that may stay as the files quantize them: how many numbers, and in how many bytes
    of memory then."""

    numbers: int = 0
    nbytes: int = 0


class LayerSize(msgspec.Struct, frozen=True, array_like=True):
    """products: multiplications of elements for a token that passes the layer, attention's over the
    context apart. cache_elements: what it keeps of each position, keys and values. expert_products:
    those of the products that are experts'. missed: the part of the experts that a token does not
    pass, so that the layer's weights are more than its products. stored: of its weights."""

    products: int
    cache_elements: int
    expert_products: int = 0
    missed: float = 0.0
    stored: StoredSize = StoredSize()

    @property
    def weights(self) -> int:
        """Numbers of its products' weights."""
        return self.products - self.expert_products + self.expert_weights

    @property
    def expert_weights(self) -> int:
        """Numbers of all experts' weights."""
        return round(self.expert_products / (1 - self.missed))


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What all but the architecture itself may know of a model: numbers.

    architecture: its name for people. rotation_elements: of tables that a stage keeps for each
    position. embedding_products, head_products: for a token that passes them. dtype: the
    checkpoint's own ("float32", "bfloat16", "float16"). max_positions: the longest context it was
    made for. embedding_stored, head_stored: of the two ends' weights. tied: whether they are the
    same one.
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
    embedding_stored: StoredSize = StoredSize()
    head_stored: StoredSize = StoredSize()
    tied: bool = False

    @property
    def has_stored(self) -> bool:
        """Whether there are weights that may stay as the files quantize them."""
        ends = self.embedding_stored, self.head_stored
        return any(each.numbers for each in (*ends, *(layer.stored for layer in self.layers)))

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self.layers)
