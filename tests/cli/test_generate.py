"""`headrace generate` as a user runs it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import headrace
from command import Finished, run
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

CAPITAL = ["--chat", "--prompt", "What is the capital of France?"]
SMOLLM2 = ["generate", "--model", "smollm2", "--max-model-len", "512", "--temperature", "0"]


def as_json(finished: Finished) -> dict[str, Any]:
    assert finished.code == 0, finished.err
    assert finished.left == []
    document: dict[str, Any] = json.loads(finished.out)
    return document


def test_json_tells_tokens_text_timing_and_each_stage() -> None:
    answer = as_json(run(*SMOLLM2, "-pp", "2", *CAPITAL, "--max-tokens", "32", "--json"))
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["prompt_tokens"] == 37
    assert 0 < len(answer["output_token_ids"]) < 32
    assert set(answer["timing"]) == {"load_s", "first_token_s", "output_tokens_per_s"}
    assert all(value > 0 for value in answer["timing"].values())
    first, last = answer["stages"]
    assert (first["layers"], last["layers"]) == (16, 14)
    for stage in (first, last):
        assert 0 < stage["busy_fraction"] <= 1
        assert stage["peak_memory_bytes"] > stage["weight_bytes"] > 0
    assert first["feedback_wait_s"] > 0
    assert last["feedback_wait_s"] == first["activation_wait_s"] == 0
    assert last["activation_wait_s"] > 0


def test_float32_tokens_are_the_same_whole_and_split_unevenly() -> None:
    common = [*SMOLLM2, *CAPITAL, "--dtype", "float32", "--json", "--max-tokens", "24"]
    common = [*common, "--ignore-eos"]
    one = as_json(run(*common))
    uneven = as_json(run(*common, "-pp", "4", "--layer-partition", "2,1,20,7"))
    assert len(one["output_token_ids"]) == 24
    assert one["output_token_ids"] == uneven["output_token_ids"]
    assert [stage["layers"] for stage in uneven["stages"]] == [2, 1, 20, 7]
    # Each stage holds its own weights only: together they are one copy, but for the tied matrix.
    whole = one["stages"][0]["weight_bytes"]
    parts = [stage["weight_bytes"] for stage in uneven["stages"]]
    assert max(parts) < 0.7 * whole
    assert sum(parts) == whole


def test_text_streams_to_standard_output_and_the_table_to_standard_error() -> None:
    finished = run(*SMOLLM2, "-pp", "2", *CAPITAL, "--max-tokens", "32")
    assert finished.code == 0
    assert finished.out == "The capital of France is Paris.\n"
    assert "tokens/s" in finished.err
    assert "busy" in finished.err


def test_the_same_seed_draws_the_same_text_at_any_number_of_stages(tmp_path: Path) -> None:
    model = str(write_tiny_gguf(tmp_path / "model.gguf"))
    common = ["generate", "--model", model, "--prompt", "once", "--json", "--max-tokens", "20"]
    common = [*common, "--temperature", "1.5", "--ignore-eos"]
    ids = [
        as_json(run(*common, "-pp", stages, "--seed", seed))["output_token_ids"]
        for stages, seed in [("1", "5"), ("2", "5"), ("1", "6")]
    ]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


def test_prompts_come_from_a_file_or_standard_input_alike(tmp_path: Path) -> None:
    model = str(write_tiny_gguf(tmp_path / "model.gguf"))
    common = ["generate", "--model", model, "--json", "--temperature", "0", "--max-tokens", "9"]
    two_stages = ["-pp", "2", "--token-feedback", "blocking", "--num-microbatches", "3"]
    text = "café, naïve — 東京"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    answers = [
        as_json(run(*common, *two_stages, "--prompt", text)),
        as_json(run(*common, "--prompt-file", str(file))),
        as_json(run(*common, stdin=text.encode())),
    ]
    assert answers[0]["prompt_tokens"] == len(text.encode())
    assert len({tuple(a["output_token_ids"]) for a in answers}) == 1


def test_a_prompt_longer_than_a_step_runs_in_chunks(tmp_path: Path) -> None:
    model = str(write_tiny_gguf(tmp_path / "model.gguf"))
    common = ["generate", "--model", model, "--json", "--temperature", "0", "--max-tokens", "5"]
    common = [*common, "--prompt", "x" * 100]
    whole = as_json(run(*common))
    small = ["--max-num-batched-tokens", "7", "--block-size", "5"]
    chunks = as_json(run(*common, "-pp", "2", *small))
    assert whole["output_token_ids"] == chunks["output_token_ids"]


def test_a_hugging_face_directory_runs_with_its_own_tokenizer_and_chat_template(
    tmp_path: Path,
) -> None:
    model = str(write_tiny_llama(tmp_path / "model"))
    answer = as_json(
        run("generate", "--model", model, "--json", "--max-tokens", "5", "--chat",
            "--prompt", "hello")
    )  # fmt: skip
    assert answer["prompt_tokens"] == len("user: hello\nassistant:")


CLOSED = [">&-", "<&- >&- 2>&-"]


@pytest.fixture(scope="module")
def with_closed_streams(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, "subprocess.CompletedProcess[bytes]"]:
    """What becomes of the command by the streams that are closed: all at the same time."""
    model = write_tiny_gguf(tmp_path_factory.mktemp("closed") / "model.gguf")
    command = f"{sys.executable} -m headrace generate --model {model} --prompt hi -pp 2"

    def in_shell(closed: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(
            ["bash", "-c", f"{command} --max-tokens 3 --temperature 0 --json {closed}"],
            capture_output=True,
            timeout=60,
            check=False,
        )

    with ThreadPoolExecutor() as pool:
        return dict(zip(CLOSED, pool.map(in_shell, CLOSED), strict=True))


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_standard_streams_do_not_matter(
    with_closed_streams: dict[str, "subprocess.CompletedProcess[bytes]"], closed: str
) -> None:
    shell = with_closed_streams[closed]
    assert shell.returncode == 0
    assert shell.stderr == b""
    if ">&-" not in closed.replace("2>&-", ""):
        assert len(json.loads(shell.stdout)["output_token_ids"]) == 3


def test_a_large_caller_does_not_show_in_the_stages_memory(tmp_path: Path) -> None:
    """Processes inherit the peak that getrusage reports; ours must not."""
    model = write_tiny_gguf(tmp_path / "model.gguf")
    code = (
        "from headrace import LLM, SamplingParams\n"
        "big = bytearray(11 * 10**8); del big\n"
        f"with LLM({str(model)!r}) as llm:\n"
        "    llm.generate('hi', SamplingParams(max_tokens=2)); llm.settle()\n"
        "    print(llm.snapshot.usage[0].peak_memory_bytes)\n"
    )
    shell = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=True
    )
    assert 10**7 < int(shell.stdout) < 10**9


def test_the_version_is_the_packages() -> None:
    finished = run("--version")
    assert finished.out == f"headrace {headrace.__version__}\n"
    assert version("headrace") == headrace.__version__


def test_help_lists_the_commands_and_flags() -> None:
    assert "generate" in run().out
    flags = run("generate", "--help").out
    for flag in ("-pp", "--layer-partition", "--token-feedback", "--num-microbatches", "--json"):
        assert flag in flags
