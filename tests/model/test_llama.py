"""Logits of tiny random checkpoints equal transformers', through stages, chunks and the cache."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greedy import run_stages
from headrace.checkpoint.locate import locate_model
from headrace.deployment.partition import stage_shares
from headrace.model.weights import open_tensors
from headrace.protocol.stored_tensor import StoredTensor
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_llama

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key-value head": {"num_key_value_heads": 1},
    "a key-value head for each head": {"num_key_value_heads": 4},
    "three heads for one": {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2},
    "heads wider than hidden": {"head_dim": 16},
    "tied head": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "another epsilon": {"rms_norm_eps": 1e-2},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "llama3 rope": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
    "yarn rope": {"rope_parameters": {**YARN, "original_max_position_embeddings": 32}},
    "yarn rope with a factor of its own": {
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 32,
            "attention_factor": 0.8,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        }
    },
    "mistral": {"architecture": "Mistral", "sliding_window": None},
    "mistral with a sliding window": {"architecture": "Mistral", "sliding_window": 9},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_logits_equal_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny_llama(tmp_path / "model", **options)
    prompt = torch.randint(0, 299, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, logits = run_stages(path, [1, 2, 1], prompt, outputs=12, chunk=16)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def edit(path: Path, **fields: Any) -> None:
    """Set fields of config.json; None deletes one."""
    file = path / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) | fields
    given = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(given), encoding="utf-8")


def rewrite(
    path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def with_a_head_of_its_own(path: Path) -> None:
    write_tiny_llama(path, tie_word_embeddings=True)
    rewrite(path, lambda tensors: tensors | {"lm_head.weight": torch.randn(300, 32)})


def with_a_window_that_llama_has_none_of(path: Path) -> None:
    write_tiny_llama(path)
    edit(path, sliding_window=9, use_sliding_window=True, max_window_layers=2)


def with_windows_in_some_layers(path: Path) -> None:
    write_tiny_llama(path, architecture="Mistral", sliding_window=9)
    edit(path, layer_types=["full_attention", "sliding_attention"] * 2)


def of_mistral_without_its_window(path: Path) -> None:
    write_tiny_llama(path, architecture="Mistral", sliding_window=9)
    edit(path, layer_types=["full_attention"] * 4)


def that_names_no_architecture(path: Path) -> None:
    write_tiny_llama(path, architecture="Mistral", sliding_window=9)
    edit(path, architectures=None)


def of_a_base_model(path: Path) -> None:
    """Without "model." before its tensors' names."""
    write_tiny_llama(path, tie_word_embeddings=True)
    edit(path, architectures=["LlamaModel"])
    rewrite(path, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()})


def without_the_biases_it_speaks_of(path: Path) -> None:
    write_tiny_llama(path)
    edit(path, attention_bias=True, mlp_bias=True)


def with_one_of_the_biases_it_speaks_of(path: Path) -> None:
    write_tiny_llama(path, attention_bias=True, mlp_bias=True)
    rewrite(
        path,
        lambda tensors: {
            name: tensor
            for name, tensor in tensors.items()
            if not name.endswith("bias") or ".k_proj." in name or ".up_proj." in name
        },
    )


def with_biases_it_does_not_speak_of(path: Path) -> None:
    write_tiny_llama(path, attention_bias=True)
    edit(path, attention_bias=False)


def with_scaling_in_old_words(path: Path) -> None:
    write_tiny_llama(path)
    edit(path, rope_parameters=None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2})


def with_scaling_that_begins_beyond_its_context(path: Path) -> None:
    write_tiny_llama(path)
    edit(path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})


def with_yarn_that_derives_its_factor(path: Path) -> None:
    write_tiny_llama(path)
    yarn = {**YARN, "factor": None, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
    edit(path, rope_parameters=yarn, original_max_position_embeddings=32)


def with_an_index_beside_the_whole(path: Path) -> None:
    """Which transformers does not look at then."""
    write_tiny_llama(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone"}}')


def with_code_of_its_own(path: Path) -> None:
    """Which transformers has its own code for."""
    write_tiny_llama(path)
    edit(path, auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (path / "own.py").write_text("raise SystemExit('this ran')")


@pytest.mark.parametrize(
    "write",
    [
        with_a_head_of_its_own, with_a_window_that_llama_has_none_of, with_windows_in_some_layers,
        of_mistral_without_its_window, that_names_no_architecture, of_a_base_model,
        without_the_biases_it_speaks_of, with_one_of_the_biases_it_speaks_of,
        with_biases_it_does_not_speak_of, with_scaling_in_old_words,
        with_scaling_that_begins_beyond_its_context, with_yarn_that_derives_its_factor,
        with_an_index_beside_the_whole, with_code_of_its_own,
    ],
    ids=lambda write: write.__name__,
)  # fmt: skip
def test_a_directory_means_what_it_means_to_transformers(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    from transformers import AutoModelForCausalLM

    write(tmp_path / "model")
    prompt = torch.randint(0, 299, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, logits = run_stages(tmp_path / "model", [2, 2], prompt, outputs=4, chunk=16)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, trust_remote_code=False
    ).eval()
    with torch.inference_mode():
        whole = reference(torch.tensor([prompt + tokens]), use_cache=False)
    expected = whole.logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_loads_with_its_exact_values(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny_llama(tmp_path / "model", dtype=dtype)
    assert read_model(locate_model(str(path))).sizes.dtype == str(dtype).removeprefix("torch.")
    tokens, logits = run_stages(path, [4], [1, 2, 3], outputs=4, chunk=16)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([[1, 2, 3, *tokens]])).logits[0, 2:-1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_shards_with_an_index_give_the_same_as_one_file(tmp_path: Path) -> None:
    one = write_tiny_llama(tmp_path / "one")
    shards = write_tiny_llama(tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    expected = run_stages(one, [2, 2], [5, 6, 7], outputs=6, chunk=16)
    found = run_stages(shards, [2, 2], [5, 6, 7], outputs=6, chunk=16)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_a_stage_loads_only_its_own_tensors(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model")
    files = locate_model(str(path))
    model = read_model(files)

    @dataclass
    class Spy:
        inner: Any = field(default_factory=lambda: open_tensors(files))
        names: list[str] = field(default_factory=list)

        def has(self, name: str) -> bool:
            return bool(self.inner.has(name))

        def load(self, tensor: StoredTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
            self.names.append(tensor.name)
            loaded: torch.Tensor = self.inner.load(tensor, dtype)
            return loaded

    loaded = []
    for share in stage_shares([1, 2, 1]):
        spy = Spy()
        load_stage(files, model, share, source=spy)
        loaded.append(set(spy.names))
    assert {n.split(".")[2] for n in loaded[1]} == {"1", "2"}
    assert "model.embed_tokens.weight" in loaded[0] - loaded[1] - loaded[2]
    assert {"lm_head.weight", "model.norm.weight"} <= loaded[2] - loaded[1] - loaded[0]
    assert len(loaded[0] | loaded[1] | loaded[2]) == sum(len(names) for names in loaded)
