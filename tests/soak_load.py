"""Mixed load on a server: what a fixed set of requests is answered, whatever happens meanwhile."""

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headrace.client import Client
from headrace.errors import ServerError

_WORDS = [
    "water", "wheel", "river", "mill", "stone", "old", "light", "morning", "the", "a", "of", "and",
    "in", "to", "with", "over", "under", "keeps", "turns", "flows", "carries", "slowly", "always",
    "never", "when", "why", "because", "story", "about", "miller",
]  # fmt: skip
_CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "stop": [". ", "zz"]},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.5, "n": 2},
]
# One prompt in so many is long, one begins as others do; one request in so many is a chat.
_LONG, _COMMON, _CHAT = 4, 3, 5
# What comes of a completion: its text, and why it ended. In the order of their index.
Answer = list[tuple[str, str | None]]


@dataclass(frozen=True)
class Case:
    """A request over HTTP, which may be streamed or not."""

    path: str
    body: dict[str, Any]


@dataclass
class Account:
    """What came of the requests. whole: answers read to their end; hung_up: those given up by their
    client. lost: errors, by what was said; wrong: answers that are not the undisturbed ones."""

    whole: int = 0
    hung_up: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.whole + self.hung_up + len(self.lost)


def make_cases(count: int, longest_prompt: int, longest_answer: int, random: Random) -> list[Case]:
    """Prompts of up to so many characters, answers of up to so many tokens."""
    common = _text(longest_prompt // 2, random)
    cases = []
    for number in range(count):
        length = longest_prompt if number % _LONG == 0 else random.randint(8, longest_prompt // 6)
        text = _text(length, random)
        if number % _COMMON == 0:
            text = (common + text)[:longest_prompt]
        body = {
            **_CHOICES[number % len(_CHOICES)],
            "seed": number,
            "max_tokens": random.randint(1, longest_answer),
        }
        if number % _CHAT == 0:
            body.pop("logprobs", None)
            messages = [{"role": "user", "content": text}]
            cases.append(Case("/v1/chat/completions", {**body, "messages": messages}))
        else:
            cases.append(Case("/v1/completions", {**body, "prompt": text}))
    return cases


async def ask(client: Client, case: Case, stream: bool) -> Answer:
    """The whole answer. Raises ServerError."""
    if not stream:
        whole = json.loads(await client.post(case.path, case.body))
        return [
            (choice["message"]["content"] if "message" in choice else choice["text"],
             choice["finish_reason"])
            for choice in sorted(whole["choices"], key=lambda choice: choice["index"])
        ]  # fmt: skip
    found: dict[int, tuple[str, str | None]] = {}
    async for data in client.stream(case.path, {**case.body, "stream": True}):
        for choice in json.loads(data)["choices"]:
            text, reason = found.get(choice["index"], ("", None))
            delta = choice.get("delta", choice)
            more = delta.get("content", delta.get("text")) or ""
            found[choice["index"]] = (text + more, choice["finish_reason"] or reason)
    return [answer for _, answer in sorted(found.items())]


@dataclass
class Load:
    """Clients that ask one request after the other. expected: what is answered without a fault, by
    case; hang_ups: the part of the requests that is given up, from 0 to 1; answer_s: the longest
    that an answer may take before it counts as lost."""

    url: str
    cases: list[Case]
    expected: list[Answer]
    random: Random
    hang_ups: float = field(kw_only=True)
    answer_s: float = field(kw_only=True)
    account: Account = field(default_factory=Account)

    async def run(self, concurrency: int, seconds: float) -> None:
        """Ask for so long; then every answer is awaited."""
        end_at = time.monotonic() + seconds
        async with Client(self.url) as client, asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(self._ask_on(client, end_at))

    async def _ask_on(self, client: Client, end_at: float) -> None:
        while time.monotonic() < end_at:
            number = self.random.randrange(len(self.cases))
            case, stream = self.cases[number], self.random.random() < 0.7
            try:
                async with asyncio.timeout(self.answer_s):
                    if self.random.random() < self.hang_ups:
                        await self._hang_up(client, case, stream)
                        self.account.hung_up += 1
                        continue
                    answer = await ask(client, case, stream)
            except ServerError as error:
                self.account.lost.append(f"case {number} was lost: {error}")
                continue
            except TimeoutError:
                self.account.lost.append(f"case {number} had no answer in {self.answer_s:g} s")
                continue
            self.account.whole += 1
            if answer != self.expected[number]:
                self.account.wrong.append(
                    f"case {number}: {answer} instead of {self.expected[number]}"
                )

    async def _hang_up(self, client: Client, case: Case, stream: bool) -> None:
        """At some moment from the request's sending on, or after some events."""
        if not stream or self.random.random() < 0.5:
            try:
                async with asyncio.timeout(self.random.uniform(0.0, 0.3)):
                    await ask(client, case, stream)
            except TimeoutError:
                pass
            return
        async with aclosing(client.stream(case.path, {**case.body, "stream": True})) as events:
            for _ in range(self.random.randint(1, case.body["max_tokens"])):
                await anext(events, None)


def _text(length: int, random: Random) -> str:
    text = ""
    while len(text) < length:
        text += random.choice(_WORDS) + " "
    return text[:length]
