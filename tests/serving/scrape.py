"""What /metrics says, and waiting for it to say something."""

import re
from urllib.request import urlopen

from command import wait_until

# All of them are 0 once nobody asks for anything.
IDLE = ("num_requests_running", "num_requests_waiting", "slots_used", "kv_blocks_used",
        "steps_in_flight")  # fmt: skip
_SAMPLE = re.compile(r"^(?:headrace:)?(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


def scrape(url: str) -> dict[str, float]:
    """The server's numbers by name, without headrace: before them; those with labels added up."""
    found: dict[str, float] = {}
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def wait_for(url: str, **values: float) -> None:
    """Wait until the numbers have these values."""

    def there() -> bool:
        found = scrape(url)
        return all(found[name] == value for name, value in values.items())

    wait_until(there)


def wait_until_idle(url: str) -> None:
    """Wait until nothing runs or waits, and all slots and blocks are back."""
    wait_for(url, **dict.fromkeys(IDLE, 0.0))
