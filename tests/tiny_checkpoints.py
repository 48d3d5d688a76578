"""Random checkpoints of a few thousand weights, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_tiny_llama(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    architecture: str = "Llama",
    max_shard_size: str = "5GB",
    **options: Any,
) -> Path:
    """A Llama or Mistral model directory with a byte-level tokenizer."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 299,
    }
    config = getattr(transformers, f"{architecture}Config")(**{**sizes, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    # Norms and biases start as ones and zeros, which would hide them from a comparison.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    write_byte_tokenizer(path)
    return path


def write_byte_tokenizer(path: Path) -> None:
    """A tokenizer with a token a byte, ids 0 to 255, and an end token, 299."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    vocabulary |= {f"<extra{n}>": n for n in range(256, 299)} | {"<end>": 299}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    wrapped.save_pretrained(path)
