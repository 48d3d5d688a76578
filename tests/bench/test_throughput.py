import json
from typing import Any

import pytest
import typer

from headrace.cli import bench_latency, bench_throughput
from headrace.cli.bench import app
from headrace.errors import ModelError, UsageError
from tiny_checkpoints import write_tiny_gguf


def run(*arguments: str) -> None:
    typer.main.get_command(app).main([*arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def check_where(answer: dict[str, Any]) -> None:
    assert answer["machine"].keys() == {"cpu", "cores", "features", "memory_gib"}
    assert answer["machine"]["cores"] >= 1
    assert answer["versions"].keys() == {"headrace", "torch", "python"}


def check_spread(answer: dict[str, Any], name: str) -> None:
    assert 0 < answer[f"{name}_min"] <= answer[name] <= answer[f"{name}_max"]


def test_throughput_counts_every_token_of_every_round(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        "throughput", "--model", checkpoint, "-pp", "2", "--num-prompts", "6", "--input-len", "20",
        "--output-len", "8", "--max-num-seqs", "4", "--rounds", "3", "--json",
        "--layer-partition", "1,3", "--cpu-bind", "none", "--cpu-threads", "1",
    )  # fmt: skip
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    said = {
        "model": checkpoint, "pp": 2, "dtype": "bfloat16", "num_prompts": 6, "input_len": 20,
        "output_len": 8, "max_num_seqs": 4, "rounds": 3, "output_tokens": 6 * 8,
    }  # fmt: skip
    assert {key: answer[key] for key in said} == said
    check_spread(answer, "output_tokens_per_s")
    speeds = answer["output_tokens_per_s_rounds"]
    assert answer["output_tokens_per_s"] == sorted(speeds)[1]
    assert answer["total_tokens_per_s"] == pytest.approx(
        answer["output_tokens_per_s"] * (20 + 8) / 8, rel=1e-2
    )
    assert answer["ready_s"] > 0
    assert answer["num_microbatches"] >= 1
    assert [stage["layers"] for stage in answer["stages"]] == [1, 3]
    assert all((stage["cpus"], stage["threads"]) == ([], 1) for stage in answer["stages"])
    assert all(stage["kernels"] for stage in answer["stages"])
    assert all(0 < stage["busy_fraction"] <= 1 for stage in answer["stages"])
    check_where(answer)
    bench_throughput._print_figures(answer)
    assert "busy fraction" in (shown := capsys.readouterr().out)
    assert "python 3" in shown.splitlines()[-1]


def test_latency_times_every_token_of_one_request_at_a_time(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        "latency", "--model", checkpoint, "--input-len", "20", "--output-len", "8",
        "--rounds", "3", "--dtype", "float32", "--json",
    )  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    said = {"model": checkpoint, "pp": 1, "dtype": "float32", "rounds": 3}
    assert {key: answer[key] for key in said} == said
    check_spread(answer, "output_tokens_per_s")
    assert [stage["layers"] for stage in answer["stages"]] == [4]
    assert all(stage["kernels"] for stage in answer["stages"])
    check_spread(answer, "ttft_ms")
    assert len(answer["output_tokens_per_s_rounds"]) == 3
    # Of tokens that one step hands out together the later ones took no time.
    assert 0 <= answer["token_ms_p50"] <= answer["token_ms_p90"] <= answer["token_ms_p99"]
    # The whole answer takes longer than its first token.
    assert 8 / answer["output_tokens_per_s"] * 1e3 > answer["ttft_ms_min"]
    check_where(answer)
    bench_latency._print_figures(answer)
    assert "ttft_ms" in (shown := capsys.readouterr().out)
    assert "python 3" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["throughput", "--num-prompts", "0"], UsageError, "--num-prompts must be from 1"),
        (["throughput", "--input-len", "0"], UsageError, "--input-len must be from 1"),
        (["throughput", "--output-len", "0"], UsageError, "--output-len must be from 1"),
        (["throughput", "--rounds", "0"], UsageError, "--rounds must be from 1"),
        (["throughput", "--dtype", "int8"], UsageError, "dtype must be one of"),
        (["throughput", "--num-microbatches", "x"], UsageError, "must be auto or a number"),
        (["throughput", "--cpu-bind", "0-x"], UsageError, "--cpu-bind '0-x' is neither"),
        (["throughput", "--model", "/nowhere"], ModelError, "no such file"),
        (["throughput", "--input-len", "8192"], UsageError, "--max-model-len 8272 is more than"),
        (["latency", "--output-len", "1"], UsageError, "--output-len must be from 2"),
        (["latency", "--rounds", "0"], UsageError, "--rounds must be from 1"),
        (["latency", "--model", "/nowhere"], ModelError, "no such file"),
    ],
)
def test_wrong_usage_says_what_to_do_before_anything_runs(
    arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(*arguments)
