"""Faults planted in real stages' processes, by a sitecustomize.py that Python runs there first."""

from dataclasses import dataclass
from pathlib import Path

_PLANTED = """
import os, sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent


def plant(module):
    forward = module.ModelExecutor.forward

    def faulty(self, plan, inputs):
        for file in FOLDER.glob("fails-*"):
            if file.name == "fails-" + sys.argv[2].rpartition("-")[2]:
                file.unlink()
                raise RuntimeError("planted in a layer")
        poison = [int(f.name.partition("-")[2]) for f in FOLDER.glob("poison-*")]
        slots = {s for s, slot in self._slots.items() if set(slot.admission.prompt) & set(poison)}
        if slots & {row.slot for row in plan.rows}:
            if (FOLDER / "aborts").exists():
                os.abort()
            raise RuntimeError("planted poison")
        return forward(self, plan, inputs)

    module.ModelExecutor.forward = faulty


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "headrace.execution.model_executor":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_plant(module):
            execute(module)
            plant(module)

        spec.loader.exec_module = execute_and_plant
        return spec


if "headrace.pipeline.stage_process" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
"""


@dataclass(frozen=True)
class Faults:
    """A folder that stages look into before each step, once it is on their PYTHONPATH."""

    folder: Path

    def fail_once(self, rank: int) -> None:
        """Have this rank raise in its next step."""
        (self.folder / f"fails-{rank}").touch()

    def poison(self, token: int, *, aborts: bool) -> None:
        """Have any stage fail whenever it computes a prompt with this token. aborts: its process
        ends by a signal of its own, instead of raising."""
        if aborts:
            (self.folder / "aborts").touch()
        (self.folder / f"poison-{token}").touch()


def planted(folder: Path) -> Faults:
    """Faults that lie in this folder."""
    (folder / "sitecustomize.py").write_text(_PLANTED, encoding="ascii")
    return Faults(folder)
