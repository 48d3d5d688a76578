"""Code planted in real processes of the engine: a sitecustomize.py that Python runs there first."""

from pathlib import Path

_BEGINNING = """
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
IS_STAGE = "headrace.pipeline.stage_process" in sys.orig_argv
# A stage's rank; its last arguments are the addresses of its sockets.
RANK = sys.orig_argv[-2].rpartition("-")[2] if IS_STAGE else None


class Planter:
    def __init__(self, name, plant):
        self.name, self.plant = name, plant

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_plant(module):
            execute(module)
            self.plant(module)

        spec.loader.exec_module = execute_and_plant
        return spec


def when_imported(name, plant):
    sys.meta_path.insert(0, Planter(name, plant))
"""


def plant(folder: Path, *pieces: str) -> None:
    """Have every Python process with this folder on its PYTHONPATH run these pieces of code first.

    They know FOLDER, IS_STAGE, RANK (as text), and when_imported(name, plant), which calls plant
    with a module once it was imported.
    """
    (folder / "sitecustomize.py").write_text("\n\n".join([_BEGINNING, *pieces]), encoding="ascii")
