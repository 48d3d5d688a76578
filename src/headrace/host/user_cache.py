"""Where this user keeps what can be had again: Headrace's folder among the caches."""

import os
from pathlib import Path

from headrace.errors import StartError


def user_cache() -> Path:
    """$XDG_CACHE_HOME/headrace, or ~/.cache/headrace (freedesktop.org, XDG Base Directory
    Specification), which no other user may enter if it had to be made. Raises StartError if it
    cannot be."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The specification has relative paths ignored.
        caches = Path(named) if named.startswith("/") else Path.home() / ".cache"
        folder = caches / "headrace"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise StartError(
            f"no folder for what is received ({error}): name one by XDG_CACHE_HOME"
        ) from error
    return folder
