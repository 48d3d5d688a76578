import itertools
import json
from pathlib import Path

import pytest
import torch
import typer

from headrace.bench import kernel_cases, kernels
from headrace.bench.kernel_cases import CHUNK, CONTEXT, Case
from headrace.bench.kernels import measure_case
from headrace.bench.model_shape import shape_of
from headrace.cli import bench_kernels
from headrace.cli.bench import app
from headrace.errors import ModelError, StartError, UsageError
from headrace.kernels import PATH_VARIABLE, REFERENCE, path
from headrace.model.architectures.mixtral import MIXTRAL
from stage_models import described_program, small_mistral
from tiny_checkpoints import write_tiny_gguf

needs_native = pytest.mark.skipif(not path.has_native(), reason="there are no native kernels")

PRODUCTS = ["qkv", "attention_out", "gate_up", "down", "head"]
BY_ROWS = [
    "attention decode", "rotate_and_write", *(f"linear {name}" for name in PRODUCTS),
    "add_rms_norm", "silu_and_multiply", "embed", "choose greedy", "choose draw",
    "choose top_k_top_p",
]  # fmt: skip
# 2 heads of 16 numbers, one of them a key-value head.
SMALL = shape_of(small_mistral(hidden_size=24, intermediate_size=40, head_dim=16))


def test_a_model_with_experts_is_refused() -> None:
    program = described_program(MIXTRAL, num_hidden_layers=1)
    with pytest.raises(UsageError, match="experts"):
        shape_of(program)


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["kernels", *arguments], standalone_mode=False)


@needs_native
def test_every_kernel_is_measured_at_every_number_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", heads=2, kv_heads=1))
    run("--model", model, "--rows", "1,3", "--rounds", "2", "--cpu-threads", "1", "--json")
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    said = {"model": model, "dtype": "bfloat16", "rounds": 2, "threads": 1}
    assert {key: answer[key] for key in said} == said
    assert answer["kernels"] in path.paths()[1:]
    cases = {(case["kernel"], case["rows"]): case for case in answer["cases"]}
    expected = {(kernel, rows) for kernel in BY_ROWS for rows in (1, 3)}
    assert cases.keys() == expected | {("attention prefill", CHUNK)}
    assert len(cases) == len(answer["cases"])
    for (kernel, _), case in cases.items():
        for name in ("us", "reference_us"):
            assert 0 < case[f"{name}_min"] <= case[name] <= case[f"{name}_max"]
        assert case["ratio"] == pytest.approx(case["reference_us"] / case["us"], rel=1e-2)
        assert case["gb_per_s"] > 0
        assert (case["gflop_per_s"] is not None) == kernel.startswith(("linear", "attention"))
        product = kernel.startswith("linear")
        among = ("torch float32", "torch bfloat16") if product else ("torch",)
        assert case["reference"] in among
    assert {"machine", "versions"} <= answer.keys()
    bench_kernels._print_figures(answer)
    assert "linear gate_up" in capsys.readouterr().out


@pytest.fixture
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "_MOST_COPIES", 2)


@needs_native
@pytest.mark.usefixtures("few_copies")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_and_torch_are_given_the_same(dtype: torch.dtype) -> None:
    own = path.path_name()
    cases = list(kernel_cases.kernel_cases(SMALL, dtype, [1, 3]))
    assert path.path_name() == own
    compared = 0
    for case in cases:
        answers = [case.native(), *(call() for call in case.by_torch.values())]
        if case.kernel.startswith(("attention", "silu", "embed", "choose")):
            first, second = answers
            assert isinstance(first, torch.Tensor)
            assert isinstance(second, torch.Tensor)
            torch.testing.assert_close(first, second, rtol=0.05, atol=0.05)
            compared += 1
    assert compared == 2 * 6 + 1


@needs_native
@pytest.mark.usefixtures("few_copies")
def test_work_by_hand() -> None:
    works = {
        (case.kernel, case.rows): (case.operations, case.bytes_moved)
        for case in kernel_cases.kernel_cases(SMALL, torch.bfloat16, [3])
    }
    assert works["linear qkv", 3] == (2 * 3 * 24 * 64, 2 * (24 * 64 + 3 * 24 + 3 * 64))
    # Queries read, answers written; a key and a value of each position.
    queries, position = 2 * 2 * 2 * 16, 2 * 2 * 16
    assert works["attention decode", 3] == (
        4 * 2 * 16 * 3 * CONTEXT,
        3 * (queries + CONTEXT * position),
    )
    attended = CHUNK * (CHUNK + 1) // 2
    assert works["attention prefill", CHUNK] == (
        4 * 2 * 16 * attended,
        CHUNK * (queries + position),
    )
    assert works["embed", 3] == (0, 2 * 2 * 3 * 24)


def test_weights_are_there_in_more_copies_than_caches_hold() -> None:
    assert kernel_cases._copies(2**20) == 256
    assert kernel_cases._copies(2**30) == 1
    turns: list[str] = []
    call = kernel_cases._in_turn(turns.append, ["a", "b", "c"])
    for _ in range(4):
        call()
    assert turns == ["a", "b", "c", "a"]


def test_figures_are_medians_against_the_faster_way_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def taking(*seconds: float) -> kernel_cases.Call:
        """Calls that take so long, in turn."""
        turn = itertools.cycle(seconds)

        def call() -> None:
            nonlocal now
            now += next(turn)

        return call

    monkeypatch.setattr(kernels, "perf_counter", lambda: now)
    ways = {"slow": taking(4.0), "fast": taking(2.0)}
    # Two calls are the warm-up, then each round has one.
    native = taking(9.0, 9.0, 1.0, 0.5, 5.0)
    answer = measure_case(Case("k", 3, native, ways, 10**10, 10**9), rounds=3)
    assert answer == {
        "kernel": "k", "rows": 3, "us": 1e6, "us_min": 0.5e6, "us_max": 5e6, "gflop_per_s": 10.0,
        "gb_per_s": 1.0, "reference": "fast", "reference_us": 2e6, "reference_us_min": 2e6,
        "reference_us_max": 2e6, "ratio": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--rows", "1,x"], UsageError, "--rows must be numbers such as 1,8,32, not '1,x'"),
        (["--rows", "0"], UsageError, "--rows must be from 1"),
        (["--rounds", "0"], UsageError, "--rounds must be from 1"),
        (["--cpu-threads", "0"], UsageError, "--cpu-threads must be at least 1"),
        (["--dtype", "float16"], UsageError, "--dtype must be one of float32, bfloat16"),
        (["--model", "/nowhere"], ModelError, "no such file"),
        (["--model", "synthetic:1+1"], UsageError, "--model must be a real one"),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(*arguments)


def test_without_native_kernels_there_is_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, REFERENCE)
    with pytest.raises(StartError, match="no native kernels to measure: unset HEADRACE_KERNELS"):
        run("--model", str(write_tiny_gguf(tmp_path / "tiny.gguf")))
