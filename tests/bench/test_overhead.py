import json
import re
import time
from pathlib import Path

import pytest
import torch
import typer

from headrace.bench.kernel_clock import KernelClock, timed_kernels
from headrace.bench.overhead import decode_steps, full_steps
from headrace.checkpoint.locate import locate_model
from headrace.cli import bench_overhead
from headrace.cli.bench import app
from headrace.errors import ModelError, UsageError
from headrace.execution.model_executor import ModelExecutor
from headrace.host.alone import answer_alone
from headrace.host.cpus import StageCpus
from headrace.kernels import REFERENCE, path
from headrace.protocol.plan import (
    Admission,
    BlocksAppended,
    Plan,
    Row,
    Sampling,
    TokenRef,
    Yield,
)
from headrace.sampling import sampler
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_gguf

# Of a Llama model, in the order of a step.
PARTS = [
    "embed", "norm", "qkv", "rotate", "attention", "attention_out", "gate_up", "silu", "down",
    "head", "sampling",
]  # fmt: skip


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["overhead", *arguments], standalone_mode=False)


def test_a_decode_steps_time_is_divided_into_kernels_and_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        "--model", str(write_tiny_gguf(tmp_path / "tiny.gguf", heads=2, kv_heads=1)),
        "--num-prompts", "4", "--input-len", "8", "--output-len", "6", "--rounds", "2", "--json",
        "--cpu-threads", "1",
    )  # fmt: skip
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    said = {"pp": 1, "dtype": "bfloat16", "num_prompts": 4, "rounds": 2}
    assert {key: answer[key] for key in said} == said
    for name in ("step_us", "python_us_per_step", "python_share"):
        assert 0 < answer[f"{name}_min"] <= answer[name] <= answer[f"{name}_max"]
    assert answer["python_us_per_step"] < answer["step_us"]
    assert answer["python_share"] < 1
    # All prompts fit one step, which yields the first of six tokens.
    assert answer["steps"] == 2 * 5
    assert answer["kernel_calls_per_step"] >= 3
    decode, prefill = answer["profile"]["decode"], answer["profile"]["prefill"]
    assert (decode["tokens"], decode["steps"]) == (4, 10)
    assert decode["step_us"] == answer["step_us"]
    assert (prefill["tokens"], prefill["steps"]) == (4 * 8, 2)
    for steps in (decode, prefill):
        assert [*steps["percent"]] == [*PARTS, "python"]
        assert all(share > 0 for share in steps["percent"].values())
        assert sum(steps["percent"].values()) == pytest.approx(100, abs=0.1)
    assert {"machine", "versions"} <= answer.keys()
    bench_overhead._print_figures(answer)
    assert "python_us_per_step" in capsys.readouterr().out


def test_the_clock_adds_up_what_kernels_take_by_part() -> None:
    clock = KernelClock(["norm", "qkv", "head"])

    def kernel(seconds: float, answer: int) -> int:
        time.sleep(seconds)
        return answer

    norm = clock.around("norm", kernel)
    assert [norm(0.01, n) for n in range(2)] == [0, 1]
    for part in ("qkv", "head"):
        clock.around(part, kernel)(0.01, 0)
    seconds, calls = clock.take()
    assert calls == 4
    assert seconds["norm"] >= 0.02
    assert min(seconds["qkv"], seconds["head"]) >= 0.01
    assert sum(seconds.values()) == seconds["norm"] + seconds["qkv"] + seconds["head"]
    assert clock.take() == (dict.fromkeys(seconds, 0.0), 0)


def run_step(file: Path) -> tuple[dict[str, float], int, float]:
    """A step of three tokens, with the clock on: seconds by part, calls, seconds of all."""
    files = locate_model(str(file))
    model = load_stage(files, read_model(files), max_model_len=16)
    with torch.inference_mode():
        executor = ModelExecutor(model, 1, 1, 16, 1, torch.device("cpu"))
        admission = Admission(0, [1, 2, 3], [], 0, Sampling(seed=0))
        row = Row(0, [1, 2, 3], 0, Yield.TOKEN)
        plan = Plan(0, 0, 0, [row], [admission], [BlocksAppended(0, [0])], [])
        executor.begin(plan)
        with timed_kernels(model) as clock:
            began = time.perf_counter()
            activations = executor.forward(plan, torch.tensor([1, 2, 3]))
            executor.sample(plan, executor.logits(plan, activations))
            return *clock.take(), time.perf_counter() - began


# One call for all layers; or each kernel its own, since no native one attends with heads of 8.
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("kernels", sorted({path.paths()[0], path.paths()[-1]}))
def test_every_part_of_a_step_has_its_time(
    tmp_path: Path, heads: int, kv_heads: int, kernels: str
) -> None:
    own, sampling = path.path_name(), sampler.choose_by_torch
    path.use_path(kernels)
    try:
        seconds, calls, all_s = run_step(
            write_tiny_gguf(tmp_path / "tiny.gguf", heads=heads, kv_heads=kv_heads)
        )
    finally:
        path.use_path(own)
    assert [*seconds] == PARTS
    assert all(spent > 0 for spent in seconds.values())
    assert sum(seconds.values()) < all_s
    attends = heads == 2 and kernels != REFERENCE
    # In one call: all layers, the head; or what is between attention, which is by torch.
    in_one_call, by_torch = 1 + 1 + 1, 1 + 4 * 9 + 1 + 2 + 1
    assert calls == (
        in_one_call if attends else by_torch if kernels == REFERENCE else 4 * (1 + 2) + 1 + 1 + 1
    )
    assert sampler.choose_by_torch is sampling


def test_a_process_alone_has_no_openmp_runtime_but_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gguf package would load one with a tokenizer library, where that is installed."""
    code = "import gguf, sys\nsys.stdout.write(open('/proc/self/maps').read())\n"
    (tmp_path / "says_maps.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    maps = answer_alone("says_maps", "it", StageCpus([], 1), b"").decode()
    assert "python" in maps
    assert not re.findall(r"lib(?:gomp|iomp|omp)", maps)


def decoding(*slots: int) -> list[Row]:
    return [Row(slot, [TokenRef(0, slot)], None, Yield.TOKEN) for slot in slots]


def test_only_steps_that_decode_a_row_of_each_request_and_do_nothing_else_count() -> None:
    prompt = Row(1, [1, 2, 3], 0, Yield.TOKEN)
    admission = Admission(1, [1], [], 0, Sampling(seed=0))
    rows = [[prompt], [*decoding(0), prompt], decoding(0, 1), decoding(0, 1), decoding(0), []]
    plans = [Plan(0, n, 0, each, [], [], []) for n, each in enumerate(rows)]
    plans[2] = Plan(0, 2, 0, decoding(0, 1), [admission], [], [])
    assert decode_steps(plans, 2) == [3]
    with pytest.raises(UsageError, match="give a longer --output-len"):
        decode_steps(plans, 3)


def test_prefill_steps_are_those_with_at_least_half_of_the_most_tokens() -> None:
    rows = [Row(0, [1] * count, 0, Yield.NOTHING) for count in (8, 3, 4)]
    plans = [Plan(0, n, 0, [row], [], [], []) for n, row in enumerate(rows)]
    assert full_steps([*plans, Plan(0, 3, 0, [], [], [], [])]) == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--num-prompts", "0"], UsageError, "--num-prompts must be from 1"),
        (["--output-len", "1"], UsageError, "--output-len must be from 4"),
        (["--rounds", "0"], UsageError, "--rounds must be from 1"),
        (["--cpu-bind", "9x"], UsageError, "--cpu-bind '9x' is neither"),
        (["--model", "/nowhere"], ModelError, "no such file"),
        (["--model", "synthetic:1+1"], UsageError, "--model must be a real one"),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(*arguments)
