import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.prepared import stage_sampling
from headrace.errors import UsageError
from headrace.protocol.plan import Sampling
from headrace.sampling_params import MAX_SEED, SamplingParams

NAN, INF = float("nan"), float("inf")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def test_the_defaults_are_vllms() -> None:
    made = SamplingParams()
    assert (made.n, made.temperature, made.top_p, made.top_k, made.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert made.repetition_penalty == 1.0
    assert (made.presence_penalty, made.frequency_penalty) == (0.0, 0.0)
    assert (made.max_tokens, made.min_tokens) == (16, 0)
    assert (made.stop, made.stop_token_ids, made.bad_words) == ((), (), ())
    assert (made.logit_bias, made.seed) == (None, None)
    assert (made.logprobs, made.prompt_logprobs) == (None, None)
    assert (made.ignore_eos, made.include_stop_str_in_output) == (False, False)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "from 1 to 16384"),
        ("n", 16385, "from 1 to 16384"),
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_k", -2, "from -1 to 2147483647"),
        ("top_k", 2**31, "from -1 to 2147483647"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("repetition_penalty", 0.0, "finite and above 0"),
        ("repetition_penalty", -1.0, "finite and above 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("seed", -MAX_SEED - 2, f"from -{MAX_SEED + 1} to {MAX_SEED}"),
        ("seed", MAX_SEED + 1, f"from -{MAX_SEED + 1} to {MAX_SEED}"),
        ("max_tokens", 0, "from 1 to 2147483647"),
        ("max_tokens", 2**31, "from 1 to 2147483647"),
        ("min_tokens", -1, "from 0 to 16"),
        ("min_tokens", 17, r"from 0 to 16 \(max_tokens\)"),
        ("logprobs", -2, "from -1 to 2147483647"),
        ("logprobs", 2**31, "from -1 to 2147483647"),
        ("prompt_logprobs", -2, "from -1 to 2147483647"),
        ("prompt_logprobs", 2**31, "from -1 to 2147483647"),
        ("stop_token_ids", [3, -1], "from 0 to 2147483647"),
        ("stop_token_ids", [2**31], "from 0 to 2147483647"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("bad_words", [""], "empty"),
        ("logit_bias", {-1: 1.0}, "from 0 to 2147483647"),
        ("logit_bias", {2**31: 1.0}, "from 0 to 2147483647"),
    ],
)
def test_a_value_out_of_range_is_named_with_field_and_range(
    field: str, value: Any, allowed: str
) -> None:
    # In a list or mapping it is the last item that is wrong.
    wrong = list(value.items())[-1] if isinstance(value, dict) else value
    with pytest.raises(UsageError, match=rf"^{field}\b.*{allowed}") as caught:
        params(**{field: value})
    assert isinstance(caught.value, ValueError)
    shown = wrong if isinstance(wrong, list | tuple) else [wrong]
    assert any(repr(item) in str(caught.value) for item in shown)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "field",
    [
        "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty",
    ],
)  # fmt: skip
def test_only_finite_numbers_are_taken(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"^{field}\b.* not -?(nan|inf)$"):
        params(**{field: value})


def test_a_bias_beyond_100_counts_as_100_as_in_vllm_and_is_a_number() -> None:
    given = {1: 100.5, 2: -1e9, 3: INF, 4: -INF, 5: 99.5}
    assert params(logit_bias=given).logit_bias == {1: 100, 2: -100, 3: 100, 4: -100, 5: 99.5}
    with pytest.raises(UsageError, match=r"^logit_bias\b.* token 6 must not be nan"):
        params(logit_bias={5: 1.0, 6: NAN})


@pytest.mark.parametrize(("field", "most"), [("stop", 8192), ("bad_words", 131072)])
def test_texts_have_a_bound_on_their_sum(field: str, most: int) -> None:
    texts = [f"{n:08}" for n in range(most // 8)]
    assert len(getattr(params(**{field: texts}), field)) == most // 8
    with pytest.raises(UsageError, match=rf"^{field} may have {most} characters .* not {most + 1}"):
        params(**{field: [*texts, "x"]})
    # What is said twice counts once.
    assert getattr(params(**{field: ["ab"] * most}), field) == ("ab",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1.5), ("n", None), ("n", True), ("temperature", "hot"), ("temperature", None),
        ("top_p", [1]), ("top_k", 2.0), ("min_p", "0"), ("repetition_penalty", None),
        ("presence_penalty", {}), ("frequency_penalty", "1"), ("seed", 1.0), ("seed", "1"),
        ("max_tokens", 1.5), ("min_tokens", None), ("logprobs", 1.0), ("prompt_logprobs", True),
        ("stop", 3), ("stop", [3]), ("stop_token_ids", 3), ("stop_token_ids", ["3"]),
        ("stop_token_ids", "3"), ("bad_words", "word"), ("bad_words", [3]), ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}), ("logit_bias", {1: "a"}), ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{field} must be .*, not "):
        params(**{field: value})


def test_an_unknown_field_is_named_with_the_likeliest_or_all_there_are() -> None:
    with pytest.raises(UsageError, match=r"no field topp: did you mean top_p\?") as caught:
        params(topp=0.5)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UsageError, match=r"no field speed_up: it takes .*temperature.*top_p"):
        params(speed_up=2)


def test_several_greedy_completions_are_refused() -> None:
    with pytest.raises(UsageError, match=r"n must be 1 when using greedy sampling.* not 2"):
        params(n=2, temperature=0)
    assert params(n=2, temperature=0.5).n == 2


def test_the_borders_of_every_range_are_allowed() -> None:
    params(
        n=16384, temperature=2, top_p=1, top_k=-1, min_p=1, repetition_penalty=1e-9,
        presence_penalty=2, frequency_penalty=-2, seed=0, max_tokens=5, min_tokens=5,
        logprobs=-1, prompt_logprobs=0, logit_bias={0: -100, 1: 100}, stop_token_ids=[0],
    )  # fmt: skip
    params(temperature=0, top_p=1e-9, min_p=0, seed=MAX_SEED, max_tokens=1, repetition_penalty=50)
    assert params(max_tokens=None, min_tokens=10**6).max_tokens is None


def test_lists_may_be_given_as_lists_tuples_or_none_and_become_tuples() -> None:
    stops, ids, words, bias = ["a", "b"], [1, 2], ["x y"], {3: 1.5}
    made = params(stop=stops, stop_token_ids=ids, bad_words=words, logit_bias=bias)
    for mine in (stops, ids, words, bias):
        mine.clear()
    assert (made.stop, made.stop_token_ids, made.bad_words) == (("a", "b"), (1, 2), ("x y",))
    assert made.logit_bias == {3: 1.5}
    assert params(stop="end").stop == ("end",)
    assert params(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()
    assert params(stop_token_ids=(4,)).stop_token_ids == (4,)


def test_seed_minus_one_is_no_seed() -> None:
    assert params(seed=-1).seed is None


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_what_the_last_stage_needs_is_handed_on() -> None:
    made = params(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=1, logprobs=2, prompt_logprobs=-1,
        min_tokens=4,
    )  # fmt: skip
    assert stage_sampling(made, 9) == Sampling(
        seed=9, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, min_tokens=4, logprobs=2, prompt_logprobs=-1,
    )  # fmt: skip
    assert stage_sampling(SamplingParams(), 9) == Sampling(seed=9)


@pytest.mark.parametrize(
    "long",
    [
        {"logit_bias": dict.fromkeys(range(2000), 1.0)},
        {"logit_bias": dict.fromkeys(range(2000), 1e9)},
        {"stop_token_ids": list(range(2000))},
    ],
)
def test_long_lists_are_checked_without_a_call_for_each_entry(long: dict[str, Any]) -> None:
    """The server checks them between everybody else's tokens."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        params(**long)
    finally:
        sys.setprofile(before)
    assert 0 < calls < 1000


def test_top_k_minus_one_is_none() -> None:
    assert stage_sampling(params(top_k=-1), 9).top_k == 0


@pytest.mark.parametrize(
    ("asked", "taken"),
    [(0, 0.0), (1e-300, 0.01), (1e-6, 0.01), (0.00999, 0.01), (0.01, 0.01), (0.02, 0.02)],
)
def test_a_temperature_below_a_hundredth_counts_as_that_as_in_vllm(
    asked: float, taken: float
) -> None:
    assert params(temperature=asked).temperature == taken
    assert stage_sampling(params(temperature=asked), 9).temperature == taken
    # So only 0 is greedy.
    assert params(temperature=asked).greedy == (asked == 0)


@given(seed=st.integers(-MAX_SEED - 1, MAX_SEED).filter(lambda seed: seed != -1))
def test_every_seed_is_taken(seed: int) -> None:
    assert params(seed=seed).seed == seed
