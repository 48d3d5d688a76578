import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.protocol import codec
from headrace.protocol.messages import (
    Activity,
    EdgeAddress,
    Failure,
    Loaded,
    Loading,
    Ready,
    Report,
    Result,
    RowLogprobs,
    ShowTimeline,
    Stop,
    Timeline,
    TokenLogprobs,
)
from headrace.protocol.plan import (
    Admission,
    BlocksAppended,
    Plan,
    Row,
    Sampling,
    TokenRef,
    TokenRules,
    Yield,
    referenced_steps,
    samples,
    token_count,
)
from headrace.sampling_params import SamplingParams

numbers = st.integers(0, 2**40)
rows = st.builds(
    Row,
    slot=numbers,
    inputs=st.lists(numbers | st.builds(TokenRef, numbers, numbers), min_size=1, max_size=5),
    start=st.none() | numbers,
    yields=st.sampled_from([Yield(n) for n in range(4)]),
)
admissions = st.builds(
    Admission,
    slot=numbers,
    prompt=st.lists(numbers),
    outputs=st.lists(numbers),
    computed=numbers,
    sampling=st.builds(
        Sampling,
        seed=st.integers(0, 2**63 - 1),
        temperature=st.floats(0, 2),
        logprobs=st.none() | st.integers(-1, 9),
    ),
    rules=st.none() | numbers,
)
token_rules = st.builds(
    TokenRules,
    number=numbers,
    logit_bias=st.dictionaries(numbers, st.floats(-100, 100), max_size=2),
    bad_words=st.lists(st.lists(numbers, min_size=1, max_size=3), max_size=2),
    end_tokens=st.lists(numbers, max_size=2),
)
plans = st.builds(
    Plan,
    epoch=numbers,
    step=numbers,
    microbatch=numbers,
    rows=st.lists(rows, max_size=4),
    admitted=st.lists(admissions, max_size=2),
    appended=st.lists(st.builds(BlocksAppended, numbers, st.lists(numbers)), max_size=3),
    released=st.lists(numbers, max_size=3),
    rules=st.lists(token_rules, max_size=2),
    dropped=st.lists(numbers, max_size=2),
)


@given(plans)
def test_plans_survive_the_way_to_a_stage(plan: Plan) -> None:
    assert codec.decode_to_rank(codec.encode(plan)) == plan


def test_a_question_survives_the_way_to_a_stage() -> None:
    assert codec.decode_to_rank(codec.encode(ShowTimeline(8))) == ShowTimeline(8)


def test_an_activity_of_no_known_kind_is_refused() -> None:
    odd = Timeline(0, 0.0, [Activity("nap", 0, 0, 0, 0.0, 1.0)])  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        codec.decode_from_rank(codec.encode(odd))


@pytest.mark.parametrize(
    "message",
    [
        Result(0, 3, [[5], []], []),
        Result(0, 3, [[5]], [RowLogprobs(0, TokenLogprobs([5, 9], [-0.5, -0.1], 2), [])]),
        Report(0, 3, 1, 1.0, 2.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.5, [(3, 1.25)], 7),
        Failure(0, 1, "ModelError", "why", 7, 2, "trace"),
        Loaded(0, 0, 1, 2, "avx2", None, [EdgeAddress("feedback", 1, 0, "/tmp/x", "ab")]),
        Timeline(1, 9.5, [Activity("forward", 3, 0, 3, 9.0, None)]),
        Loading(0, "weights loaded", 0.5),
        Ready(0, 0),
    ],
)
def test_answers_survive_the_way_to_the_engine(message: object) -> None:
    assert codec.decode_from_rank(codec.encode(message)) == message  # type: ignore[arg-type]


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.decode_from_rank(codec.encode(Stop(0)))
    with pytest.raises(msgspec.ValidationError):
        codec.decode_to_rank(codec.encode(Ready(0, 0)))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_raise_a_decode_error_and_nothing_else(data: bytes) -> None:
    for decode in (codec.decode_to_rank, codec.decode_from_rank):
        with contextlib.suppress(msgspec.DecodeError):
            decode(data)


def test_a_plan_tells_its_tokens_references_and_whether_it_samples() -> None:
    refs: list[int | TokenRef] = [TokenRef(7, 0), TokenRef(4, 1), 12]
    chunk = Row(0, [1, 2, 3], 0, Yield.NOTHING)
    plan = Plan(0, 9, 0, [chunk, Row(1, refs, None, Yield.TOKEN)], [], [], [])
    assert token_count(plan) == 6
    assert referenced_steps(plan) == [4, 7]
    assert samples(plan)
    assert not samples(Plan(0, 9, 0, [chunk], [], [], []))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("max_tokens", 0),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("stop_token_ids", (3, -1)),
    ],
)
def test_sampling_parameters_out_of_range_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
