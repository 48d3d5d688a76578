from pathlib import Path

import pytest

from headrace.errors import PipelineError
from headrace.host.alone import answer_alone
from headrace.host.cpus import StageCpus

ANYWHERE = StageCpus([], 1)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that such a process finds under the name `answers`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "answers.py"


def test_a_task_larger_than_a_pipe_reaches_a_process_that_is_slow_to_start(module: Path) -> None:
    began = module.with_name("began")
    module.write_text(
        "import pathlib, sys, time\n"
        f"while not pathlib.Path({str(began)!r}).exists(): time.sleep(0.01)\n"
        "task = sys.stdin.buffer.read()\n"
        "sys.stdout.buffer.write(task[::-1])\n"
    )
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        # By now it has been waited for in vain.
        if len(looks) == 3:
            began.touch()

    task = bytes(range(256)) * 4096
    assert answer_alone("answers", "it", ANYWHERE, task, look) == task[::-1]


def test_a_process_that_fails_is_told_of_with_its_last_words(module: Path) -> None:
    module.write_text("raise SystemExit('no such thing')\n")
    with pytest.raises(PipelineError, match=r"^the thing failed: no such thing$"):
        answer_alone("answers", "the thing", ANYWHERE, b"")


def test_a_process_that_is_no_longer_wanted_ends(module: Path) -> None:
    module.write_text("import time\ntime.sleep(600)\n")
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_alone("answers", "it", ANYWHERE, b"", look)
