"""Engines whose weights stay as a GGUF file quantizes them."""

from pathlib import Path
from typing import Any

import pytest

from command import Command
from headrace import LLM, SamplingParams
from headrace.errors import UsageError
from headrace.kernels import PATH_VARIABLE, path
from quantized_checkpoints import write_quantized
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

PROMPTS = [[(7 * row + 3 * at) % 290 for at in range(3 + 5 * row % 41)] for row in range(14)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    def kind(name: str) -> str:
        return "Q6_K" if "v_proj" in name or "down" in name else "Q4_K"

    folder = tmp_path_factory.mktemp("model")
    return str(write_quantized(folder, kind, tie_word_embeddings=True)[0])


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Tokens, and all of their log-probabilities to the last bit."""
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=5, ignore_eos=True)
    found = llm.generate(prompts, params)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


@pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_gives_the_same_bits_alone_and_with_others_on_any_number_of_stages(
    model: str, dtype: str
) -> None:
    settings: dict[str, Any] = {"weights": "stored", "dtype": dtype, "max_num_batched_tokens": 64}
    with LLM(model, **settings) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert answers(llm, PROMPTS) == alone
    with LLM(model, pipeline_parallel_size=2, **settings) as llm:
        assert answers(llm, PROMPTS) == alone


@pytest.mark.skipif(not path.has_native(), reason="native kernels are not built")
def test_stages_hold_the_files_bytes_and_say_so(model: str) -> None:
    held = {}
    for weights in ("stored", "dequantized"):
        with LLM(model, dtype="bfloat16", weights=weights) as llm:
            held[weights] = sum(stage.weight_bytes for stage in llm.card.stages)
    numbers = 300 * 256 + 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    # Of 4 bits and 6, and of two scales to 32; dequantized, the table is there a second time.
    assert 5 / 8 * numbers < held["stored"] < 6.5 / 8 * numbers
    assert held["dequantized"] > 2 * (numbers + 300 * 256)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float16"}, "goes with --dtype bfloat16 or float32, not float16"),
        ({"weights": "q4"}, "weights must be one of auto, stored, dequantized"),
    ],
)
def test_what_stored_weights_do_not_go_with_is_named(
    model: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        LLM(model, **{"weights": "stored", **settings})


def test_without_native_kernels_stored_weights_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "torch")
    with pytest.raises(UsageError, match="--weights stored needs the native kernels"):
        LLM(model, weights="stored")


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_model_without_quantized_weights_is_refused_in_one_line(
    tmp_path: Path, kind: str
) -> None:
    model = (
        write_tiny_llama(tmp_path / "model")
        if kind == "directory"
        else write_tiny_gguf(tmp_path / "model.gguf")
    )
    arguments = ["generate", "--model", str(model), "--weights", "stored", "--prompt", "Hello"]
    finished = Command(arguments).finish()
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert "--weights stored: model" in line
    assert "Q4_0, Q4_1" in line
