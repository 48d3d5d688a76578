"""Where what can be had again is kept."""

from pathlib import Path

import pytest

from headrace.errors import StartError
from headrace.host.user_cache import user_cache


def test_it_is_where_the_user_keeps_caches_and_nobody_else_may_enter_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert user_cache() == tmp_path / "home" / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert user_cache() == tmp_path / "caches" / "headrace"
    assert user_cache().stat().st_mode & 0o777 == 0o700


def test_one_that_cannot_be_made_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartError, match="name one by XDG_CACHE_HOME"):
        user_cache()
