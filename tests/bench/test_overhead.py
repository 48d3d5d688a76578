import json
import time
from pathlib import Path

import pytest
import torch
import typer

from headrace.bench.kernel_clock import KernelClock, timed_kernels
from headrace.bench.overhead import decode_steps
from headrace.cli import bench_overhead
from headrace.cli.bench import app
from headrace.errors import ModelError, UsageError
from headrace.kernels import reference
from headrace.protocol.plan import Admission, Plan, Row, Sampling, TokenRef, Yield
from tiny_checkpoints import write_tiny_gguf


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["overhead", *arguments], standalone_mode=False)


def test_a_decode_steps_time_is_divided_into_kernels_and_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        "--model", str(write_tiny_gguf(tmp_path / "tiny.gguf")), "--num-prompts", "4",
        "--input-len", "8", "--output-len", "6", "--rounds", "2", "--json", "--cpu-threads", "1",
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
    assert answer["kernel_calls_per_step"] >= 4 * 4
    assert {"machine", "versions"} <= answer.keys()
    bench_overhead._print_answer(answer)
    assert "python_us_per_step" in capsys.readouterr().out


def test_the_clock_adds_up_what_kernels_take_and_counts_one_inside_another_once() -> None:
    clock = KernelClock()

    def kernel(seconds: float, answer: int) -> int:
        time.sleep(seconds)
        return answer

    slow = clock.around(kernel)
    assert [slow(0.01, answer=n) for n in range(2)] == [0, 1]
    assert clock.calls == 2
    assert clock.seconds >= 0.02
    twice = clock.around(lambda: slow(0.01, 0) + slow(0.01, 0))
    before_s = clock.seconds
    began = time.perf_counter()
    twice()
    assert clock.calls == 3
    assert 0.02 <= clock.seconds - before_s <= time.perf_counter() - began


def test_products_and_reference_kernels_are_timed_and_restored() -> None:
    before = torch.nn.functional.linear, reference.rms_norm
    with timed_kernels() as clock:
        torch.nn.functional.linear(torch.zeros(1, 2), torch.zeros(3, 2))
        reference.rms_norm(torch.ones(1, 2), torch.ones(2), 1e-5)
    assert clock.calls == 2
    assert (torch.nn.functional.linear, reference.rms_norm) == before


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--num-prompts", "0"], UsageError, "--num-prompts must be from 1"),
        (["--output-len", "1"], UsageError, "--output-len must be from 4"),
        (["--rounds", "0"], UsageError, "--rounds must be from 1"),
        (["--cpu-bind", "9x"], UsageError, "--cpu-bind '9x' is neither"),
        (["--model", "/nowhere"], ModelError, "no such file"),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(*arguments)
