"""An engine's folder is nobody else's as long as the engine lives, and nobody's afterwards."""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from headrace.host.engine_folder import EngineFolder

MIB = 2**20


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandoned(folder: Path, name: str = "headrace-0123abcd", mode: int = 0o700) -> Path:
    """What a killed engine leaves: nobody has it locked."""
    left = folder / name
    left.mkdir()
    left.chmod(mode)
    for name in ("rank-0", "watch-0", "rank-0.log", "rank-11", "promises"):
        (left / name).touch()
    return left


def test_it_is_for_its_user_alone_and_gone_once_removed(temporary: Path) -> None:
    folder = EngineFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_the_next_engine_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    temporary: Path,
) -> None:
    living = EngineFolder()
    left = abandoned(temporary)
    following = EngineFolder()
    assert not left.exists()
    assert living.path.exists()
    living.remove()
    following.remove()


def test_the_folder_of_a_process_that_was_killed_is_removed(temporary: Path) -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        folder = EngineFolder()
        os.write(writer, str(folder.path).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    left = Path(os.read(reader, 1000).decode())
    os.close(reader)
    os.close(writer)
    assert left.exists()
    EngineFolder().remove()
    assert not left.exists()


def test_folders_that_only_look_like_an_engines_are_left_alone(temporary: Path) -> None:
    somebodys = abandoned(temporary, "headrace-00000000", mode=0o755)
    with_more = abandoned(temporary, "headrace-11111111")
    (with_more / "thesis.tex").touch()
    named = abandoned(temporary, "headrace-sources")
    elsewhere = abandoned(temporary, "elsewhere")
    link = temporary / "headrace-22222222"
    link.symlink_to(elsewhere)
    EngineFolder().remove()
    for folder in (somebodys, with_more, named, elsewhere, link):
        assert (folder / "rank-0.log").exists()


def test_engines_that_start_at_once_do_not_take_each_others_folders_for_abandoned() -> None:
    def start(_: int) -> EngineFolder:
        return EngineFolder()

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(start, range(80)))
    assert all(folder.path.exists() for folder in folders)
    for folder in folders:
        folder.remove()


def test_the_end_of_a_fork_leaves_the_folder_locked() -> None:
    folder = EngineFolder()
    if (child := os.fork()) == 0:
        folder.leave()
        folder.remove()
        os._exit(0)
    os.waitpid(child, 0)
    EngineFolder().remove()
    assert folder.path.exists()
    folder.remove()


def test_a_fork_that_lives_on_does_not_keep_the_folder() -> None:
    folder = EngineFolder()
    reader, writer = os.pipe()
    ready, told = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writer)
        folder.leave()
        os.write(told, b"x")
        os.read(reader, 1)
        os._exit(0)
    os.read(ready, 1)
    # As when the owner is killed: the system closes its descriptors.
    folder.leave()
    EngineFolder().remove()
    assert not folder.path.exists()
    os.close(writer)
    os.waitpid(child, 0)
    for descriptor in (reader, ready, told):
        os.close(descriptor)


def test_engines_know_what_others_were_promised_and_have_not_touched() -> None:
    one, other = EngineFolder(), EngineFolder()
    with one.promising() as promised:
        assert promised == 0
        one.promise({os.getpid(): 300 * MIB})
    with other.promising() as promised:
        assert 250 * MIB < promised <= 350 * MIB
    touched = bytearray(os.urandom(MIB)) * 200
    with other.promising() as promised:
        assert 50 * MIB < promised < 150 * MIB
    assert touched
    with one.promising() as promised:
        assert promised == 0
    one.remove()
    with other.promising() as promised:
        assert promised == 0
    other.remove()


def test_a_stage_that_has_ended_is_promised_nothing() -> None:
    one, other = EngineFolder(), EngineFolder()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    one.promise({child: MIB})
    with other.promising() as promised:
        assert promised == 0
    one.remove()
    other.remove()


def test_a_promise_to_a_stage_that_has_ended_is_forgotten() -> None:
    folder = EngineFolder()
    if (child := os.fork()) == 0:
        signal.pause()
    folder.promise({child: MIB, os.getpid(): MIB})
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    folder.promise({os.getpid(): 2 * MIB})
    promised = msgspec.json.decode((folder.path / "promises").read_bytes())
    assert [pid for pid, _ in promised] == [os.getpid()]
    folder.remove()
