"""Random checkpoints of a few thousand weights: directories by transformers, files by gguf."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_llama(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    architecture: str = "Llama",
    max_shard_size: str = "5GB",
    **options: Any,
) -> Path:
    """A Llama model's directory, or another architecture's, with a byte-level tokenizer."""
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
    # Gemma 3's language models are of a class named otherwise.
    kind = {"Gemma3": "Gemma3Text"}.get(architecture, architecture)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
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


def write_tiny_gguf(
    path: Path,
    max_positions: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    chat_template: str | None = None,
    pieces: Sequence[str] | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    seed: int = 0,
    special: Sequence[str] = (),
) -> Path:
    """A Llama model of 4 layers in one file, with the same byte-level tokenizer.

    Starts faster than a directory, whose configuration and tokenizer come through transformers.
    pieces: a SentencePiece vocabulary instead, these from id 259 on, after <unk>, <s>, </s> and the
    bytes. add: writes more metadata. seed: of its weights. special: tokens in places of those that
    are never used.
    """
    hidden, inner, vocab, layers = 32, 48, 300, 4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(max_positions)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    if pieces is None:
        add_byte_tokenizer(writer, special)
    else:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        tokens += [f"<filler{number}>" for number in range(len(tokens), vocab)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(number) for number in range(vocab)])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    add(writer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    random = np.random.default_rng(seed)

    def write(name: str, *shape: int) -> None:
        tensor = random.normal(scale=0.2, size=shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, tensor.astype(np.float32))

    write("token_embd.weight", vocab, hidden)
    write("output_norm.weight", hidden)
    write("output.weight", vocab, hidden)
    narrow = hidden * kv_heads // heads
    for layer in range(layers):
        at = f"blk.{layer}"
        write(f"{at}.attn_norm.weight", hidden)
        write(f"{at}.attn_q.weight", hidden, hidden)
        write(f"{at}.attn_k.weight", narrow, hidden)
        write(f"{at}.attn_v.weight", narrow, hidden)
        write(f"{at}.attn_output.weight", hidden, hidden)
        write(f"{at}.ffn_norm.weight", hidden)
        write(f"{at}.ffn_gate.weight", inner, hidden)
        write(f"{at}.ffn_up.weight", inner, hidden)
        write(f"{at}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_tokenizer(writer: gguf.GGUFWriter, special: Sequence[str] = ()) -> None:
    """Of 300 tokens, special ones in places of those that are never used."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = _byte_tokens()
    tokens[257 : 257 + len(special)] = special
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens[:-1]] + [3])
    # The format has no empty arrays, so there is one merge.
    writer.add_token_merges(["z z"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(299)


def _byte_tokens() -> list[str]:
    """A token a byte, ids 0 to 255, then "zz", some never used, and an end token, 299."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, "zz", *(f"<extra{n}>" for n in range(257, 299)), "<end>"]


def write_byte_tokenizer(path: Path) -> None:
    """The byte-level tokenizer as transformers stores it, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(_byte_tokens())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(path)
