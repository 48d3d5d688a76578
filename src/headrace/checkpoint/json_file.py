"""JSON files of a model directory, read with bounds: strangers wrote them."""

import json
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

# Published configurations have a few KiB; the index of a model of 700 billion weights has 9 MiB.
_MAX_BYTES = 1 << 26


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ModelError if the file cannot be read, is larger than any real one, nests too deeply, or
    holds something else. Takes memory in proportion to the file.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ModelError(f"{path} has {size} bytes; more than {_MAX_BYTES} are not plausible")
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it nests too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def one_line(error: Exception) -> str:
    """An error's text as one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
