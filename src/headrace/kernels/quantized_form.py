"""How quantized weights lie in memory, in numbers, for processes that do without torch too."""

from dataclasses import dataclass

# Inputs of a block that share a scale; activations are rounded in blocks of as many.
BLOCK = 32


@dataclass(frozen=True)
class Form:
    """How packed numbers lie (native/quantized_form.hpp). bits: of each. scales: float16, of a
    block. minimums: whether a block has one, float16: a weight is q * scale + minimum then, else
    (q - zero) * scale."""

    bits: int
    scales: int = 1
    minimums: bool = False
    zero: int = 0

    @property
    def native(self) -> tuple[int, int, bool, int]:
        """As the native kernels take it."""
        return self.bits, self.scales, self.minimums, self.zero

    @property
    def block_bytes(self) -> int:
        """Of an output's block of 32."""
        return 4 * self.bits + 2 * self.scales + 2 * self.minimums


# By GGUF's names (ggml-quants.c in llama.cpp).
FORMS = {
    "Q4_0": Form(4, zero=8),
    "Q4_1": Form(4, minimums=True),
    "Q5_0": Form(5, zero=16),
    "Q5_1": Form(5, minimums=True),
    "Q8_0": Form(8, zero=128),
    "Q4_K": Form(4, minimums=True),
    "Q5_K": Form(5, minimums=True),
    "Q6_K": Form(6, scales=2, zero=32),
}
