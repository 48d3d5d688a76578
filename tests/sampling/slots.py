"""Slots to sample for, and settings of every kind to try them with."""

from typing import Any

from hypothesis import strategies as st

from headrace.protocol.plan import Admission, Sampling, TokenRules
from headrace.sampling.rules import SlotRules
from headrace.sampling.slot import SlotSampling


def slot(
    vocab_size: int,
    prompt: list[int] | None = None,
    outputs: list[int] | None = None,
    **settings: Any,
) -> SlotSampling:
    lists = {
        name: settings.pop(name)
        for name in ("bad_words", "logit_bias", "end_tokens")
        if name in settings
    }
    sampling = Sampling(**{"seed": 1, **settings})
    rules = SlotRules(TokenRules(0, **lists), vocab_size) if lists else None
    return SlotSampling(Admission(0, prompt or [0], outputs or [], 0, sampling), vocab_size, rules)


@st.composite
def samplings(draw: st.DrawFn, vocab_size: int) -> Sampling:
    """Settings within SamplingParams' ranges; often several at once."""
    return Sampling(
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1e-5, 0.3, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6])),
        top_k=draw(st.sampled_from([0, 0, 1, 7, vocab_size, 10**6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.4])),
        min_tokens=draw(st.integers(0, 3)),
    )


@st.composite
def token_rules(draw: st.DrawFn, vocab_size: int) -> TokenRules:
    """Often none at all."""
    token = st.integers(0, vocab_size - 1)
    return TokenRules(
        0,
        bad_words=draw(st.lists(st.lists(token, min_size=1, max_size=2), max_size=2)),
        logit_bias=draw(st.dictionaries(token, st.floats(-100, 100), max_size=3)),
        end_tokens=draw(st.lists(token, max_size=2)),
    )
