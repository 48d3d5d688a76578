"""Deltas add up to outputs that later deltas leave as they are."""

import pytest

from headrace.engine.outputs import OutputDelta, OutputGatherer
from headrace.engine.request import FinishReason
from headrace.protocol.messages import TokenLogprobs
from headrace.sampling_params import SamplingParams


def delta(
    token: int | None,
    text: str,
    at: float,
    index: int = 0,
    reason: FinishReason | None = None,
    logprob: float | None = None,
) -> OutputDelta:
    found = None if token is None or logprob is None else TokenLogprobs([token], [logprob], 1)
    return OutputDelta(0, index, token, text, reason, None, found, None, 32, at, 10.0, 10.5)


def test_tokens_text_and_times_add_up() -> None:
    gatherer = OutputGatherer("7", "p", [1, 2], SamplingParams(logprobs=0), str)
    gatherer.take(delta(5, "a", 11.0, logprob=-0.5))
    first = gatherer.output()
    gatherer.take(delta(6, "", 11.5, logprob=-0.25))
    gatherer.take(delta(7, "bc", 13.0, reason="length", logprob=-1.0))
    last = gatherer.output()
    (early,), (late,) = first.outputs, last.outputs
    assert (early.token_ids, early.text, early.finished(), first.finished) == (
        [5],
        "a",
        False,
        False,
    )
    assert (late.token_ids, late.text, late.finish_reason) == ([5, 6, 7], "abc", "length")
    assert last.finished
    assert late.token_times_s == [1.0, 1.5, 3.0]
    assert late.cumulative_logprob == -1.75
    assert late.logprobs is not None
    assert early.logprobs is not None
    assert (len(early.logprobs), len(late.logprobs)) == (1, 3)
    assert (last.request_id, last.prompt, last.num_cached_tokens) == ("7", "p", 32)
    assert last.metrics.queue_s == 0.5
    assert last.metrics.first_token_s == 1.0
    assert last.metrics.total_s == 3.0
    assert last.metrics.per_token_s == 1.0


def test_completions_of_one_request_are_kept_apart() -> None:
    gatherer = OutputGatherer("7", None, [1], SamplingParams(n=2), str)
    gatherer.take(delta(5, "a", 11.0, index=1))
    gatherer.take(delta(6, "b", 11.0, index=0, reason="stop"))
    assert not gatherer.finished
    gatherer.take(delta(7, "c", 12.0, index=1, reason="length"))
    output = gatherer.output()
    assert [c.text for c in output.outputs] == ["b", "ac"]
    assert [c.finish_reason for c in output.outputs] == ["stop", "length"]
    assert output.finished
    assert output.prompt_logprobs is None


def test_prompt_logprobs_begin_with_none_and_come_in_pieces() -> None:
    gatherer = OutputGatherer("7", None, [1, 2, 3], SamplingParams(prompt_logprobs=0), str)
    for token in (2, 3):
        piece = delta(None, "", 11.0)
        piece.prompt_logprobs = [TokenLogprobs([token], [-1.0], 4)]
        gatherer.take(piece)
    found = gatherer.output().prompt_logprobs
    assert found is not None
    assert [entry if entry is None else list(entry) for entry in found] == [None, [2], [3]]


def test_a_request_without_tokens_has_no_times() -> None:
    gatherer = OutputGatherer("7", None, [1], SamplingParams(), str)
    gatherer.take(delta(None, "", 11.0, reason="abort"))
    metrics = gatherer.output().metrics
    assert (metrics.first_token_s, metrics.per_token_s) == (None, None)
    assert metrics.total_s == pytest.approx(1.0)
