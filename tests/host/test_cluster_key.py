"""The cluster's key: who has the file gets in; a file that others may read is no secret."""

import os
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.host.cluster_key import Secret, read_cluster_key, write_cluster_key


def test_a_new_key_is_its_owners_alone_and_no_two_are_the_same(tmp_path: Path) -> None:
    for name in "ab":
        write_cluster_key(tmp_path / name)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert read_cluster_key(tmp_path / "a") == read_cluster_key(tmp_path / "a")
    assert read_cluster_key(tmp_path / "a") != read_cluster_key(tmp_path / "b")


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    write_cluster_key(tmp_path / "key")
    before = read_cluster_key(tmp_path / "key")
    with pytest.raises(UsageError, match="exists"):
        write_cluster_key(tmp_path / "key")
    assert read_cluster_key(tmp_path / "key") == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_cluster_key(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:o}.*chmod 600"):
        read_cluster_key(path)


@pytest.mark.parametrize(
    "text", ["", "secret", "headrace-cluster-key-1", "headrace-cluster-key-1 " + "x" * 64,
             "headrace-cluster-key-2 " + "0" * 64, "headrace-cluster-key-1 " + "0" * 62, "\0" * 99]
)  # fmt: skip
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(UsageError, match="this is no cluster key"):
        read_cluster_key(path)


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*headrace key"):
        read_cluster_key(tmp_path / "none")


def test_everything_follows_from_the_secret_and_differs_by_purpose() -> None:
    secret = Secret(bytes(range(32)))
    assert secret.key_pair("a") == Secret(bytes(range(32))).key_pair("a")
    others = [secret.key_pair("b"), Secret(os.urandom(32)).key_pair("a"),
              secret.derive("a").key_pair("a")]  # fmt: skip
    assert len({pair.secret for pair in [secret.key_pair("a"), *others]}) == 4
    assert len({pair.public for pair in [secret.key_pair("a"), *others]}) == 4


def test_a_secret_is_not_shown() -> None:
    secret = Secret(b"\x41" * 32)
    pair = secret.key_pair("a")
    assert "AAAA" not in repr(secret)
    assert pair.secret.decode() not in repr(pair)
