"""A pipeline that stands still is an error that tells who waits for whom; a slow one is not."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest

from command import Command, Finished
from headrace import LLM, SamplingParams

STAGES = 3


@dataclass(frozen=True)
class Stopped:
    """What became of a command one of whose stages was stopped."""

    finished: Finished
    files_left: list[str]


@pytest.fixture(scope="module")
def stopped() -> Iterator[list[Stopped]]:
    """By the stage that was stopped: three commands at the same time, since they mostly wait."""
    with ExitStack() as stack:
        # Socket paths are limited to a hundred characters, which pytest's folders nearly take.
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-")))
            for _ in range(STAGES)
        ]
        commands = [stack.enter_context(start(folder)) for folder in folders]
        for victim, command in enumerate(commands):
            assert command.process.stdout is not None
            assert command.process.stdout.read(1), "text streams: every stage is at work"
            os.kill(command.stages()[victim], signal.SIGSTOP)
        ended = [command.finish() for command in commands]
        yield [
            Stopped(finished, os.listdir(folder))
            for finished, folder in zip(ended, folders, strict=True)
        ]


def start(folder: Path) -> Command:
    arguments = [
        "generate", "--model", "synthetic:20+1", "-pp", str(STAGES), "--prompt", "w1",
        "--max-tokens", "2000", "--temperature", "0", "--ignore-eos", "--stall-timeout", "2",
        "--max-restarts", "0",
    ]  # fmt: skip
    return Command(arguments, environment={"TMPDIR": str(folder)})


FROM_0 = r"the activations of step \d+ from stage 0"
FROM_1 = r"the activations of step \d+ from stage 1"
FEEDBACK = r"the token feedback of step \d+ from stage 2"


@pytest.mark.parametrize(
    ("victim", "waits"),
    [
        (0, {1: FROM_0, 2: FROM_1}),
        (1, {0: FEEDBACK, 2: FROM_1}),
        (2, {0: FEEDBACK, 1: FROM_0}),
    ],
)
def test_a_stopped_stage_ends_in_an_error_that_names_it_and_the_waits_of_the_others(
    stopped: list[Stopped], victim: int, waits: dict[int, str]
) -> None:
    finished = stopped[victim].finished
    assert finished.code == 1
    assert finished.left == []
    assert stopped[victim].files_left == []
    line, *timelines = finished.err.splitlines()
    assert re.match(
        r"headrace: the pipeline stood still for \d+\.\d s at step \d+: "
        rf"stage {victim} has given no sign of life for \d+\.\d s; ",
        line,
    )
    for stage, what in waits.items():
        assert re.search(rf"stage {stage} has waited \d+\.\d s for {what}", line)
    assert "raise --stall-timeout" in line
    text = "\n".join(timelines)
    assert f"stage {victim} does not answer; its last sign of life was " in text
    for stage in waits:
        rest = text.split(f"stage {stage}, seconds before now:\n")[1].splitlines()
        lines = list(takewhile(lambda line: line.startswith("  "), rest))
        assert all(re.search(r"-?\d+\.\d{3} to +(-?\d+\.\d{3}|now)  \w+", line) for line in lines)
        assert " now  wait for " in lines[-1]
        assert any("forward " in line for line in lines)


def test_engine_and_stages_that_are_stopped_together_and_continued_are_no_stall() -> None:
    arguments = [
        "generate", "--model", "synthetic:5+0", "-pp", "2", "--prompt", "w1",
        "--max-tokens", "4000", "--temperature", "0", "--ignore-eos", "--stall-timeout", "1",
    ]  # fmt: skip
    with Command(arguments) as command:
        assert command.process.stdout is not None
        text = command.process.stdout.fileno()
        assert os.read(text, 1), "text streams: every stage is at work"
        processes = command.processes()
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        # As a container is paused, for longer than anybody would wait for stages.
        time.sleep(2.5)
        take_all(text)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        missing = 200
        while missing > 0:
            piece = os.read(text, missing)
            assert piece, "more text than the results on their way could bring"
            missing -= len(piece)
        command.process.send_signal(signal.SIGINT)
        finished = command.finish()
    assert "stood still" not in finished.err
    assert finished.left == []


def take_all(pipe: int) -> None:
    """Read what is in a pipe that nobody writes to now."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while os.read(pipe, 65536):
            pass
    os.set_blocking(pipe, True)


def test_a_step_that_takes_longer_than_the_stall_timeout_is_no_stall() -> None:
    with LLM("synthetic:1700+0", pipeline_parallel_size=2, stall_timeout=0.8) as llm:
        (answer,) = llm.generate("w1", SamplingParams(max_tokens=1), use_tqdm=False)
    assert answer.outputs[0].token_ids == [0]
