"""A long run that does not get on ends by itself, and cleans up."""

import subprocess
import sys
from pathlib import Path

_STUCK = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from unattended import end_in_time

end_in_time(0.2)
try:
    threading.Event().wait()
finally:
    print("cleaned up")
"""


def test_a_run_that_is_stuck_says_where_and_cleans_up() -> None:
    arguments = [sys.executable, "-c", _STUCK, str(Path(__file__).parent)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "cleaned up\n")
    assert "threading.py" in ended.stderr
    assert ended.stderr.endswith("WRONG: it did not end in time; above is where it was\n")
