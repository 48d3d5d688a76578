"""Logits of tiny random checkpoints equal transformers', through stages, chunks and the cache."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint.config import config_from_huggingface
from headrace.checkpoint.locate import locate_model
from headrace.engine.request import Sequence
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.model.llama import load_llama
from headrace.model.weights import open_tensors
from headrace.pipeline.executor import ModelExecutor
from headrace.pipeline.partition import stage_shares
from headrace.pipeline.virtual_links import VirtualClock, VirtualNetwork
from headrace.pipeline.virtual_stages import VirtualStages
from headrace.protocol.messages import Result
from headrace.protocol.plan import Plan
from headrace.protocol.sampling_params import SamplingParams, resolve
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


@dataclass
class _Recorder(ModelExecutor):
    """An executor that keeps the logits it sampled from."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def sample(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(logits)
        return super().sample(plan, logits)


def run_stages(
    path: Path, layers: list[int], prompt: list[int], outputs: int, chunk: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits they came from, through real stage loops on virtual links."""
    files = locate_model(str(path))
    config = config_from_huggingface(path)
    executors = []
    for share in stage_shares(layers):
        model = load_llama(
            config,
            share,
            open_tensors(files, config),
            torch.float32,
            torch.device("cpu"),
            config.max_positions,
            lambda _: None,
        )
        executors.append(_Recorder(model, 2, 40, 4, 32, torch.device("cpu")))
    greedy = SamplingParams(temperature=0, max_tokens=outputs)
    sampling = resolve(greedy, seed=0, eos_token_ids=[], bad_words=[])
    sequence = Sequence(0, 0, prompt, greedy, sampling, outputs)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=chunk,
            block_size=4,
            num_blocks=40,
            num_microbatches=2,
            window=4,
            eos_token_ids=frozenset(),
            prefill_policy="budget",
        )
    )
    scheduler.add(sequence)
    clock = VirtualClock()
    with torch.inference_mode():
        network = VirtualNetwork(clock, len(executors))
        stages = VirtualStages(clock, network, list(executors), window=4, max_rows=2)
        while not scheduler.idle:
            while (plan := scheduler.plan()) is not None:
                stages.send(plan)
            for message in stages.receive(1.0):
                if isinstance(message, Result):
                    scheduler.take_result(message)
        stages.stop()
    return sequence.outputs, torch.cat(executors[-1].seen)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_loads_with_its_exact_values(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny_llama(tmp_path / "model", dtype=dtype)
    config = config_from_huggingface(path)
    assert config.dtype == str(dtype).removeprefix("torch.")
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
    files, config = locate_model(str(path)), config_from_huggingface(path)

    @dataclass
    class Spy:
        inner: Any = field(default_factory=lambda: open_tensors(files, config))
        names: list[str] = field(default_factory=list)

        def has(self, name: str) -> bool:
            return bool(self.inner.has(name))

        def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            self.names.append(name)
            tensor: torch.Tensor = self.inner.load(name, shape)
            return tensor

    loaded = []
    for share in stage_shares([1, 2, 1]):
        spy = Spy()
        load_llama(config, share, spy, torch.float32, torch.device("cpu"), 64, lambda _: None)
        loaded.append(set(spy.names))
    assert {n.split(".")[2] for n in loaded[1]} == {"1", "2"}
    assert "model.embed_tokens.weight" in loaded[0] - loaded[1] - loaded[2]
    assert {"lm_head.weight", "model.norm.weight"} <= loaded[2] - loaded[1] - loaded[0]
    assert len(loaded[0] | loaded[1] | loaded[2]) == sum(len(names) for names in loaded)
