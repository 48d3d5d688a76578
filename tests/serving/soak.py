"""Wears a server out: `python tests/serving/soak.py --requests 2000 --disconnects 0.3`.

Starts `headrace serve`, runs many streaming clients at once over a fixed set of requests, hangs up
on some of them before the first token or in the middle, and checks what is left: no error, no slot
or block in use, memory flat, and every whole answer equal to the offline one, in float32. Prints
the account as JSON; exit code 1 if something is wrong.
"""

import argparse
import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from headrace import LLM, SamplingParams
from headrace.client import Client
from headrace.errors import ServerError

# All of them must be 0 once nobody asks for anything.
IDLE_METRICS = ("num_requests_running", "num_requests_waiting", "slots_used", "kv_blocks_used")
# Small, so that all of it has been in use, and is in the memory figures, once warm.
KV_CACHE = "256MiB"
_START_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 30.0
_NUM_CASES = 40
_MEMORY_SAMPLES = 80
_WORDS = [
    "water", "wheel", "river", "mill", "stone", "old", "light", "morning", "the", "a", "of", "and",
    "in", "to", "with", "over", "under", "keeps", "turns", "flows", "carries", "slowly", "always",
    "never", "when", "why", "because", "story", "about", "miller",
]  # fmt: skip
_CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.2, "stop": [". "]},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.5},
]


@dataclass(frozen=True)
class Case:
    """A request: its prompt, and parameters that have the same names over HTTP and offline."""

    prompt: str
    params: dict[str, Any]


# An answer's text, why it ended, and its tokens.
Answer = tuple[str, str | None, int]


@dataclass
class Report:
    """What came of it. whole: answers read to their end. cut_early: hung up before the first token;
    cut_late: after it. different: whole answers that are not the offline one. left: what
    IDLE_METRICS say at the end. memory_mib: of each process, see flat(). exit_code: the server's,
    after SIGTERM."""

    requests: int
    whole: int = 0
    cut_early: int = 0
    cut_late: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, dict[str, float]] = field(default_factory=dict)
    exit_code: int | None = None

    def problems(self) -> list[str]:
        """Nothing if all is well."""
        return [
            *self.errors,
            *self.different,
            *(f"{name} is {value:g}" for name, value in self.left.items() if value),
            *(f"{n}: memory grew: {figures}" for n, figures in self.memory_mib.items()
              if not flat(figures)),
            *([] if self.exit_code == 0 else [f"the server's exit code is {self.exit_code}"]),
        ]  # fmt: skip


def flat(figures: dict[str, float]) -> bool:
    """Whether a process's memory stayed as it was once it was warm.

    Its first half is the warm-up. The medians of the third and of the last quarter are compared,
    so that single peaks do not count; they may differ by 2 % or 4 MiB, whatever is more, since
    allocators keep a little more or less from one moment to the next.
    """
    return figures["last"] - figures["third"] <= max(0.02 * figures["third"], 4.0)


def make_cases(longest_prompt: int, longest_answer: int, seed: int) -> list[Case]:
    """Prompts of up to so many characters, some with a common beginning; answers of up to so many
    tokens."""
    random = Random(seed)
    common = _text(longest_prompt // 2, random)
    cases = []
    for number in range(_NUM_CASES):
        length = random.randint(8, longest_prompt)
        text = _text(length, random)
        if number % 3 == 0:
            text = (common + text)[:longest_prompt]
        params = {**_CHOICES[number % len(_CHOICES)], "seed": number,
                  "max_tokens": random.randint(1, longest_answer)}  # fmt: skip
        cases.append(Case(text, params))
    return cases


def run_soak(
    model: str,
    *,
    requests: int,
    disconnects: float,
    concurrency: int = 64,
    num_stages: int = 2,
    longest_prompt: int = 1200,
    longest_answer: int = 64,
    seed: int = 0,
) -> Report:
    """The whole of it. disconnects: the part of the requests to hang up on, from 0 to 1."""
    cases = make_cases(longest_prompt, longest_answer, seed)
    report = Report(requests)
    answers: list[tuple[int, Answer]] = []
    with _server(model, num_stages) as (process, url):
        server = psutil.Process(process.pid)
        soak = _Soak(url, cases, report, answers, disconnects, Random(seed), server)
        began = time.monotonic()
        asyncio.run(soak.run(concurrency))
        report.seconds = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        report.exit_code = process.wait(60.0)
    expected = _offline(model, num_stages, cases)
    for number, answer in answers:
        report.output_tokens += answer[2]
        if answer != expected[number]:
            report.different.append(f"case {number}: {answer} instead of {expected[number]}")
    return report


@dataclass
class _Soak:
    url: str
    cases: list[Case]
    report: Report
    answers: list[tuple[int, Answer]]
    disconnects: float
    random: Random
    server: psutil.Process
    memory: dict[str, list[float]] = field(default_factory=dict)

    async def run(self, concurrency: int) -> None:
        numbers = iter(range(self.report.requests))
        async with Client(self.url) as client:
            (self.model, *_) = await client.models()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(self._ask_on(client, numbers))
            self.report.left = await _until_idle(client)
        self.report.memory_mib = {name: _memory_figures(m) for name, m in self.memory.items()}

    async def _ask_on(self, client: Client, numbers: Iterator[int]) -> None:
        """One client: a request after the other, as long as there are any."""
        every = max(self.report.requests // _MEMORY_SAMPLES, 1)
        for number in numbers:
            if number % every == 0:
                self._sample_memory()
            case_number = self.random.randrange(len(self.cases))
            case = self.cases[case_number]
            body = {
                "model": self.model,
                "prompt": case.prompt,
                **case.params,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                if self.random.random() < self.disconnects:
                    await self._hang_up(client, body)
                else:
                    answer = await _answer(client, body)
                    self.answers.append((case_number, answer))
                    self.report.whole += 1
            except ServerError as error:
                self.report.errors.append(f"request {number}: {error}")

    async def _hang_up(self, client: Client, body: dict[str, Any]) -> None:
        """Before the first token, at some moment from the request's sending on, or after it."""
        async with aclosing(client.stream("/v1/completions", body)) as events:
            if self.random.random() < 0.5:
                try:
                    async with asyncio.timeout(self.random.uniform(0.0, 0.2)):
                        await anext(events)
                except TimeoutError:
                    self.report.cut_early += 1
                    return
            for _ in range(self.random.randint(1, body["max_tokens"])):
                await anext(events, None)
            self.report.cut_late += 1

    def _sample_memory(self) -> None:
        stages = sorted(self.server.children(), key=lambda child: child.pid)
        for name, process in [("server", self.server), *((f"child {s.pid}", s) for s in stages)]:
            self.memory.setdefault(name, []).append(process.memory_info().rss / 2**20)


async def _answer(client: Client, body: dict[str, Any]) -> Answer:
    text, reason, tokens = "", None, 0
    async for data in client.stream("/v1/completions", body):
        event = json.loads(data)
        for choice in event["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return text, reason, tokens


async def _until_idle(client: Client) -> dict[str, float]:
    """IDLE_METRICS, once they are all 0 or it is too late for that."""
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while True:
        metrics = (await client.get("/metrics")).decode()
        values = {
            name: float(found[1])
            for name in IDLE_METRICS
            if (found := re.search(rf"^headrace:{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE))
        }
        assert len(values) == len(IDLE_METRICS), f"/metrics lacks some of {IDLE_METRICS}"
        if not any(values.values()) or time.monotonic() > deadline:
            return values
        await asyncio.sleep(0.05)


@contextmanager
def _server(model: str, num_stages: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that is ready, and its address."""
    command = [
        sys.executable, "-m", "headrace", "serve", "--model", model, "-pp", str(num_stages),
        "--dtype", "float32", "--port", "0", "--kv-cache-memory", KV_CACHE,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process, _address(process, log)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, as it says itself once it is ready."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"^ready after .*(http://\S+)/v1", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.05)
    raise TimeoutError(f"the server is not ready; its exit code is {process.poll()}")


def _offline(model: str, num_stages: int, cases: list[Case]) -> list[Answer]:
    with LLM(model, pipeline_parallel_size=num_stages, dtype="float32",
             kv_cache_memory=KV_CACHE) as llm:  # fmt: skip
        outputs = llm.generate(
            [case.prompt for case in cases], [SamplingParams(**case.params) for case in cases]
        )
    completions = [output.outputs[0] for output in outputs]
    return [(c.text, c.finish_reason, len(c.token_ids)) for c in completions]


def _memory_figures(samples: list[float]) -> dict[str, float]:
    half, quarter = len(samples) // 2, len(samples) * 3 // 4
    return {
        "first": samples[0],
        "third": statistics.median(samples[half : max(quarter, half + 1)]),
        "last": statistics.median(samples[quarter:]),
        "peak": max(samples),
    }


def _text(length: int, random: Random) -> str:
    text = ""
    while len(text) < length:
        text += random.choice(_WORDS) + " "
    return text[:length]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--disconnects", type=float, default=0.3)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("-pp", "--num-stages", type=int, default=2)
    parser.add_argument("--longest-prompt", type=int, default=1200, help="characters")
    parser.add_argument("--longest-answer", type=int, default=64, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    report = run_soak(**vars(parser.parse_args()))
    problems = report.problems()
    print(json.dumps({**asdict(report), "problems": problems}, indent=2))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
