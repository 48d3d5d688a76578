"""Streams whose answers are known, and what came of them while stages were harmed."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from headrace import LLM, SamplingParams
from headrace.engine.outputs import RequestOutput
from headrace.errors import HeadraceError

# The part of the streams that their clients give up.
_GIVEN_UP = 0.15
_PROMPTS = ["The mill wheel", "Water", "A headrace is", "Once upon a time there was a river that"]
# Text is held back for these.
_STOPS = ["zzzzzz", "\ufffd?!"]
# By completion: tokens, text, finish reason.
Answer = list[tuple[list[int], str, str | None]]


class Streaming(Protocol):
    """An engine that streams, such as AsyncLLM."""

    def generate(
        self, prompt: str, sampling_params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; each output is everything so far."""


@dataclass(frozen=True)
class Case:
    """A request, and what an engine answers that nobody disturbed."""

    prompt: str
    params: SamplingParams
    expected: Answer


@dataclass
class Account:
    """What came of the requests. aborted: streams that their clients gave up. lost, wrong: in
    words, one each. pauses: the longest between two tokens of each stream, in seconds."""

    requests: int = 0
    aborted: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"requests: {self.requests} (given up by their client: {self.aborted}), "
            f"lost: {len(self.lost)}, wrong: {len(self.wrong)}\n"
            f"longest pause of a stream: {max(self.pauses, default=0.0):.2f} s"
        )


def make_cases(model: str, tokens: int) -> list[Case]:
    """Requests, greedy and seeded, one and two completions, with stop strings and without."""
    asked: list[tuple[str, SamplingParams]] = []
    for prompt in _PROMPTS:
        for temperature, n, stop in ((0.0, 1, []), (1.0, 1, _STOPS), (1.0, 2, [])):
            params = SamplingParams(
                temperature=temperature,
                seed=len(asked),
                n=n,
                stop=stop,
                max_tokens=tokens,
                ignore_eos=True,
            )
            asked.append((prompt, params))
    with LLM(model, dtype="float32") as llm:
        outputs = llm.generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)
    return [
        Case(prompt, params, _answer(output))
        for (prompt, params), output in zip(asked, outputs, strict=True)
    ]


async def stream(
    engine: Streaming,
    case: Case,
    account: Account,
    clock: Callable[[], float],
    most: int | None = None,
) -> None:
    """One request from its beginning to its end, or until its client gives it up. most: tokens that
    it is read for, None for all. clock: seconds."""
    account.requests += 1
    answer: Answer = []
    at: float | None = None
    pause = 0.0
    try:
        async with aclosing(engine.generate(case.prompt, case.params)) as outputs:
            async for output in outputs:
                now = clock()
                pause = max(pause, 0.0 if at is None else now - at)
                at, answer = now, _answer(output)
                if most is not None and sum(len(tokens) for tokens, _, _ in answer) >= most:
                    break
    except HeadraceError as error:
        account.lost.append(str(error))
        return
    except asyncio.CancelledError:
        account.lost.append(f"{case.prompt!r} had not ended, after {answer}")
        raise
    account.pauses.append(pause)
    if any(reason == "error" for _, _, reason in answer):
        account.lost.append(f"{case.prompt!r} was given up by the engine")
    elif most is not None:
        account.aborted += 1
        if not _begins(case.expected, answer):
            account.wrong.append(f"{case.prompt!r}: {answer} begins not as {case.expected}")
    elif answer != case.expected:
        account.wrong.append(f"{case.prompt!r}: {answer} instead of {case.expected}")


async def ask_on(
    engine: Streaming,
    cases: list[Case],
    account: Account,
    random: Random,
    clock: Callable[[], float],
    ended: asyncio.Event,
) -> None:
    """One client: a request after the other until the end."""
    while not ended.is_set():
        case = random.choice(cases)
        tokens = case.params.max_tokens or 1
        most = random.randint(1, tokens) if random.random() < _GIVEN_UP else None
        await stream(engine, case, account, clock, most)


def _answer(output: RequestOutput) -> Answer:
    return [(list(o.token_ids), o.text, o.finish_reason) for o in output.outputs]


def _begins(whole: Answer, part: Answer) -> bool:
    return all(
        (tokens[: len(some)], text[: len(begun)]) == (some, begun)
        for (tokens, text, _), (some, begun, _) in zip(whole, part, strict=True)
    )
