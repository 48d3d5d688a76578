import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.bench.batch_run import Batch, BatchRun, median_run
from headrace.cli.bench import app
from headrace.engine.rank_usage import RankUsage
from headrace.errors import UsageError
from headrace.kernels.path import has_native
from tiny_checkpoints import write_tiny_gguf


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["overlap", *arguments], standalone_mode=False)


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_a_run_prints_every_figure_and_draws_and_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, trace = tmp_path / "overlap.png", tmp_path / "trace.json"
    run(
        "--synthetic-stage-ms", "1+0.05", "-pp", "2", "--num-prompts", "8", "--input-len", "4",
        "--output-len", "8", "--rounds", "1", "--plot", str(picture), "--trace", str(trace),
        "--link-latency-ms", "0.1", "--json",
    )  # fmt: skip
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    assert answer["label"] == "synthetic: stages sleep 1 ms a step and 0.05 ms a row, no model runs"
    assert answer["emulated_link"] == {"latency_ms": 0.1, "bandwidth_mbps": None}
    said = {key: answer[key] for key in ("model", "pp", "num_prompts", "input_len", "output_len")}
    assert said == {
        "model": "synthetic:1+0.05", "pp": 2, "num_prompts": 8, "input_len": 4, "output_len": 8,
    }  # fmt: skip
    assert (answer["dtype"], answer["rounds"]) == ("float32", 1)
    for setting in ("deferred", "blocking", "blocking_best"):
        figures = answer[setting]
        assert 1 <= figures["num_microbatches"] <= 8
        assert (
            0
            < figures["output_tokens_per_s_min"]
            <= figures["output_tokens_per_s"]
            <= figures["output_tokens_per_s_max"]
        )
        # A step cannot be shorter than what a stage sleeps.
        assert figures["step_ms_p50"] >= 1
        assert len(figures["ranks"]) == 2
        for stage in figures["ranks"]:
            assert stage.keys() == {"busy_fraction", "feedback_wait_s", "activation_wait_s"}
            assert 0 < stage["busy_fraction"] < 1
    speed = {name: answer[name]["output_tokens_per_s"] for name in ("deferred", "blocking")}
    assert answer["ratio"] == pytest.approx(speed["deferred"] / speed["blocking"], rel=1e-2)
    best = answer["blocking_best"]
    assert best["num_microbatches"] == int(
        max(best["trials_tokens_per_s"], key=best["trials_tokens_per_s"].get)
    )
    assert best["trials_tokens_per_s"].keys() == {"1", "2", "3", "4"}
    assert answer["ideal_step_ms"] >= 1
    assert answer["efficiency"] == pytest.approx(
        answer["ideal_step_ms"] / answer["measured_step_ms"], rel=1e-2
    )
    assert answer["slowest_stage"] in (0, 1)
    assert answer["ratio_best"] > 0
    assert answer["vllm_pr_51650_ratio"] == 1.325
    assert all(math.isfinite(number) for number in numbers(answer))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def batch_run(tokens_per_s: float) -> BatchRun:
    return BatchRun([], 0.0, 10 / tokens_per_s, 10, 1, [], [RankUsage()])


@pytest.mark.long
@pytest.mark.skipif(not has_native(), reason="native kernels were not built")
def test_it_runs_with_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    run(
        "--model", str(model), "-pp", "2", "-tp", "2", "--num-prompts", "4", "--input-len", "4",
        "--output-len", "8", "--rounds", "1", "--plot", str(tmp_path / "overlap.png"), "--json",
    )  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    assert (answer["pp"], answer["tp"], len(answer["deferred"]["ranks"])) == (2, 2, 4)
    # What a stage takes alone is not known.
    assert "efficiency" not in answer
    assert answer["ratio"] > 0


def test_the_median_run_is_the_slower_of_two_in_the_middle() -> None:
    runs = [batch_run(speed) for speed in (5.0, 1.0, 4.0, 2.0)]
    assert median_run(runs).tokens_per_s == 2.0
    assert median_run(runs[:3]).tokens_per_s == 4.0


def test_prompts_depend_on_the_seed_alone() -> None:
    prompts = Batch(3, 5, 1, seed=7).prompts(100)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert prompts == Batch(3, 5, 9, seed=7).prompts(100) != Batch(3, 5, 1, seed=8).prompts(100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --model or --synthetic-stage-ms"),
        (["--model", "smollm2", "--synthetic-stage-ms", "1+1"], "either"),
        (["--synthetic-stage-ms", "fast"], "'fast' is not a stage's time such as 2"),
        (["-pp", "1"], "--pipeline-parallel-size must be at least 2, not 1"),
        (["--rounds", "0"], "--rounds must be from 1"),
        (["--num-prompts", "0"], "--num-prompts must be from 1"),
        (["--output-len", "1"], "--output-len must be from 2"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--num-microbatches", "many"], "--num-microbatches must be auto or a number"),
        (["--num-prompts", "2", "--num-microbatches", "3"], "more than the 2 sequences"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png cannot be written: No such file"),
        (["--trace", "/nowhere/x.json"], "--trace /nowhere/x.json cannot be written: No such"),
    ],
)
def test_wrong_usage_says_what_to_do_before_anything_runs(
    arguments: list[str], message: str
) -> None:
    flags = arguments
    if arguments and not {"--model", "--synthetic-stage-ms"} & set(arguments):
        flags = ["--synthetic-stage-ms", "1+0", *arguments]
    with pytest.raises(UsageError, match=message):
        run(*flags)
