import json
import math
from pathlib import Path

import pytest
import typer

from headrace.bench import roofline
from headrace.bench.batch_run import Batch
from headrace.bench.roofline import Rate, Rates, decode_work, limit, prefill_work
from headrace.checkpoint.locate import locate_model
from headrace.cli.bench import app
from headrace.errors import ModelError, UsageError
from headrace.model.architectures.mixtral import MIXTRAL
from stage_models import described_program, read_model, small_mistral, whole
from tiny_checkpoints import write_tiny_gguf

# 3 layers of 2 heads of 4 numbers, one of them a key-value head.
SMALL = small_mistral()
LAYER = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
WEIGHTS = 3 * LAYER + 100 * 8


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(["roofline", *arguments], standalone_mode=False)


def test_work_by_hand() -> None:
    """2 requests of 3 tokens in and 3 out: decode steps attend to 4 and to 5 positions."""
    batch = Batch(2, 3, 3, seed=0)
    prefill = prefill_work(SMALL, "float32", batch)
    assert prefill.operations == 2 * (3 * LAYER * 6 + 800 * 2) + 4 * 3 * 2 * 4 * (1 + 2 + 3) * 2
    assert prefill.bytes_read == 4 * WEIGHTS
    decode = decode_work(SMALL, "bfloat16", batch)
    assert decode.operations == 2 * (2 * WEIGHTS + 4 * 3 * 2 * 4 * 4.5)
    assert decode.bytes_read == 2 * WEIGHTS + 2 * 4.5 * (2 * 3 * 1 * 4 * 2)


def test_nothing_beyond_a_sliding_window_is_read() -> None:
    config = small_mistral(sliding_window=2)
    batch = Batch(2, 3, 3, seed=0)
    full = decode_work(SMALL, "bfloat16", batch).bytes_read - 2 * WEIGHTS
    short = decode_work(config, "bfloat16", batch).bytes_read - 2 * WEIGHTS
    assert short == full * 2 / 4.5


def test_of_experts_those_are_read_that_rows_choose() -> None:
    """Each row passes 1 of 4 experts of 3 * 8 * 16 weights; two rows read 7 of 16 on average."""
    program = described_program(
        MIXTRAL, vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, tie_word_embeddings=True,
        num_local_experts=4, num_experts_per_tok=1, sliding_window=None,
    )  # fmt: skip
    batch = Batch(2, 3, 3, seed=0)
    plain, mixed = decode_work(SMALL, "bfloat16", batch), decode_work(program, "bfloat16", batch)
    router, expert = 8 * 4, 3 * 8 * 16
    assert mixed.operations == plain.operations + 2 * 2 * 3 * router
    assert mixed.bytes_read == plain.bytes_read + 2 * 3 * (router + (4 * 7 / 16 - 1) * expert)
    prefill = prefill_work(program, "bfloat16", Batch(1000, 3, 3, seed=0))
    assert prefill.bytes_read == pytest.approx(2 * 2 * (WEIGHTS + 3 * (router + 3 * expert)))


def test_smollm2s_decode_step_reads_what_was_counted_by_hand() -> None:
    """269 MB of weights, and for 32 requests of 288 positions on average 212 MB of cache."""
    config = whole(read_model(locate_model("smollm2")))
    step = decode_work(config, "bfloat16", Batch(32, 256, 64, seed=0))
    assert step.bytes_read == pytest.approx(269e6 + 212e6, rel=1e-3)


def rates(read: float, float32: float, bfloat16: float) -> Rates:
    """Of which the square products are the better ones."""
    return Rates(
        1,
        Rate([read]),
        {"float32": Rate([float32 / 2]), "bfloat16": Rate([bfloat16 / 2])},
        {"float32": Rate([float32]), "bfloat16": Rate([bfloat16])},
    )


def test_the_limit_is_the_longer_of_reading_and_computing_at_the_best_rates() -> None:
    batch = Batch(2, 3, 3, seed=0)
    answer = limit(SMALL, "bfloat16", batch, [rates(1e9, 1e6, 1e3), rates(1e8, 2e6, 1e3)])
    assert answer["arithmetic"] == "float32"
    assert (answer["read_gb_per_s"], answer["gflop_per_s"]) == (1.0, 2e-3)
    assert answer["prefill"]["bound_by"] == answer["decode_step"]["bound_by"] == "arithmetic"
    prefill, step = prefill_work(SMALL, "bfloat16", batch), decode_work(SMALL, "bfloat16", batch)
    seconds = (prefill.operations + 2 * step.operations) / 2e6
    assert answer["seconds"] == pytest.approx(seconds)
    assert answer["output_tokens_per_s"] == pytest.approx(6 / seconds)
    slow = limit(SMALL, "bfloat16", batch, [rates(1e3, 1e9, 1e10)])
    assert slow["arithmetic"] == "bfloat16"
    assert slow["decode_step"]["bound_by"] == "memory"
    # Numbers of float32 cannot be multiplied in bfloat16.
    assert limit(SMALL, "float32", batch, [rates(1e3, 1e9, 1e10)])["arithmetic"] == "float32"


def test_one_output_token_needs_no_decode_step() -> None:
    answer = limit(SMALL, "float32", Batch(2, 3, 1, seed=0), [rates(1e9, 1e9, 1e9)])
    assert answer["decode_steps"] == answer["decode_step"]["ms"] == 0
    assert math.isfinite(answer["output_tokens_per_s"])


def test_the_command_prints_rates_for_one_thread_and_all_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "_READ_BYTES", 2**20)
    monkeypatch.setattr(roofline, "_ROWS", 16)
    monkeypatch.setattr(roofline, "usable_cores", lambda: 2)
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    flags = ["--model", model, "--num-prompts", "2", "--rounds", "2", "--input-len", "8"]
    run(*flags, "--json")
    answer = json.loads(capsys.readouterr().out)
    assert [rate["threads"] for rate in answer["rates"]] == [1, 2]
    for rate in answer["rates"]:
        assert len(rate) == 6
        for key in rate.keys() - {"threads"}:
            assert 0 < rate[key]["min"] <= rate[key]["median"] <= rate[key]["max"]
    assert answer["limit"]["model"] == model
    assert answer["limit"]["decode_step"]["bound_by"] in ("memory", "arithmetic")
    assert {"machine", "versions"} <= answer.keys()
    run(*flags)
    assert "limit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--dtype", "float16"], UsageError, "--dtype must be one of float32, bfloat16"),
        (["--num-prompts", "0"], UsageError, "--num-prompts must be from 1"),
        (["--rounds", "0"], UsageError, "--rounds must be from 1"),
        (["--model", "/nowhere"], ModelError, "no such file"),
        (["--model", "synthetic:1+1"], UsageError, "--model must be a real one"),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(*arguments)
