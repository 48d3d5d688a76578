"""The chaos run finds what is lost and what is wrong, and nothing else."""

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos import run
from chaos_load import Account, Case, stream
from disturbance import Harm, place_of
from faults import planted
from headrace import SamplingParams
from headrace.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from headrace.errors import PipelineError
from tiny_checkpoints import write_tiny_gguf

CASE = Case("water", SamplingParams(max_tokens=3), [([1, 2, 3], "abc", "length")])


@dataclass
class Scripted:
    """An engine that gives these outputs one after the other, then raises the error, if any."""

    outputs: list[CompletionOutput]
    error: Exception | None = None

    async def generate(
        self, prompt: str, sampling_params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        for output in self.outputs:
            ended = output.finish_reason is not None
            metrics = RequestMetrics(0.0, None, 0.0, None)
            yield RequestOutput("0", prompt, [], [output], ended, None, 0, metrics)
        if self.error is not None:
            raise self.error


def output(text: str, reason: str | None = None) -> CompletionOutput:
    """Of so many tokens as characters; a is token 1."""
    tokens = [ord(character) - ord("a") + 1 for character in text]
    return CompletionOutput(0, text, tokens, finish_reason=reason)  # type: ignore[arg-type]


def account_of(
    engine: Scripted, most: int | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Account:
    account = Account()
    asyncio.run(stream(engine, CASE, account, clock, most))
    return account


def test_an_answer_that_is_the_undisturbed_one_is_neither_lost_nor_wrong() -> None:
    account = account_of(Scripted([output("a"), output("abc", "length")]))
    assert (account.requests, account.lost, account.wrong) == (1, [], [])


@pytest.mark.parametrize(
    "last",
    [
        output("abd", "length"),
        output("ab", "length"),
        output("abc", "stop"),
        CompletionOutput(0, "ab", [1, 2, 3], finish_reason="length"),
    ],
)
def test_another_token_text_or_reason_is_wrong(last: CompletionOutput) -> None:
    account = account_of(Scripted([output("a"), last]))
    assert (len(account.lost), len(account.wrong)) == (0, 1)


def test_a_stream_that_its_client_gives_up_must_begin_as_the_whole() -> None:
    good = account_of(Scripted([output("a"), output("ab"), output("abd")]), most=2)
    assert (good.aborted, good.wrong) == (1, [])
    bad = account_of(Scripted([output("a"), output("ac")]), most=2)
    assert (bad.aborted, len(bad.wrong)) == (1, 1)


def test_a_request_that_ends_in_an_error_is_lost() -> None:
    blamed = account_of(Scripted([output("a"), output("a", "error")]))
    broken = account_of(Scripted([output("a")], PipelineError("it broke")))
    for account in (blamed, broken):
        assert (len(account.lost), account.wrong) == (1, [])


def test_a_stream_that_never_goes_on_is_lost() -> None:
    account = Account()

    async def give_up_waiting() -> None:
        stuck = asyncio.create_task(stream(Stuck([output("a")]), CASE, account, lambda: 0.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)

    asyncio.run(give_up_waiting())
    assert (len(account.lost), account.wrong) == (1, [])


class Stuck(Scripted):
    """One that gives nothing more after its outputs, and does not end."""

    async def generate(
        self, prompt: str, sampling_params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        async for found in super().generate(prompt, sampling_params):
            yield found
        await asyncio.Event().wait()


def test_a_pause_is_the_longest_time_between_two_outputs() -> None:
    moments = iter([10.0, 11.0, 14.0])
    outputs = [output("a"), output("ab"), output("abc", "length")]
    account = account_of(Scripted(outputs), clock=lambda: next(moments))
    assert account.pauses == [3.0]
    assert "longest pause of a stream: 3.00 s" in str(account)


def test_stages_are_told_apart() -> None:
    assert [place_of(rank, 3) for rank in range(3)] == ["first", "middle", "last"]
    harm = Harm()
    harm.note("kill", "middle")
    harm.note("kill", "middle")
    assert str(harm).splitlines()[1].split() == ["kill", "0", "2", "0", "0"]


def test_faults_on_real_stages_are_recovered_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", max_positions=1024))
    options = argparse.Namespace(
        minutes=0.1,
        seed=4,
        stages=3,
        starts=1,
        streams=4,
        tokens=60,
        stall_timeout=5.0,
        pause=False,
    )
    assert asyncio.run(run(options, model, planted(tmp_path))) == []
    said = capsys.readouterr().out
    assert "lost: 0, wrong: 0" in said
    assert "faults: 0" not in said
