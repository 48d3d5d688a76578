"""Faults planted in real stages' processes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planted import plant

_PLANTED = """
import os, random, socket, threading, time, weakref

LINKS = []


def ordered(what):
    file = FOLDER / f"{what}-{RANK}"
    if file.exists():
        file.unlink()
        return True
    return False


def fail_in_layers(module):
    forward = module.ModelExecutor.forward

    def faulty(self, plan, inputs):
        if ordered("fails"):
            raise RuntimeError("planted in a layer")
        poison = [int(f.name.partition("-")[2]) for f in FOLDER.glob("poison-*")]
        slots = {s for s, slot in self._slots.items() if set(slot.admission.prompt) & set(poison)}
        if slots & {row.slot for row in plan.rows}:
            if (FOLDER / "aborts").exists():
                os.abort()
            raise RuntimeError("planted poison")
        return forward(self, plan, inputs)

    module.ModelExecutor.forward = faulty


def fail_to_load(module):
    load = module.load_model

    def faulty(*arguments):
        if ordered("unloadable"):
            raise RuntimeError("planted in a load")
        return load(*arguments)

    module.load_model = faulty


def note_links(module):
    begin = module._LocalLink.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        LINKS.append(weakref.ref(self))

    module._LocalLink.__init__ = noted


def break_links():
    while True:
        time.sleep(0.02)
        LINKS[:] = [link for link in LINKS if link() is not None]
        order = FOLDER / f"breaks-{RANK}"
        if LINKS and order.exists():
            # Held by no name, or it would outlive its epoch.
            try:
                random.choice(LINKS)()._socket.shutdown(socket.SHUT_RDWR)
            except (AttributeError, OSError):
                # It was closed meanwhile: there will be others.
                continue
            order.unlink()


if IS_STAGE:
    when_imported("headrace.execution.model_executor", fail_in_layers)
    when_imported("headrace.execution.load", fail_to_load)
    when_imported("headrace.pipeline.local_link", note_links)
    threading.Thread(target=break_links, daemon=True).start()
"""


@dataclass(frozen=True)
class Faults:
    """A folder that stages look into, once it is on their PYTHONPATH."""

    folder: Path

    def fail_once(self, rank: int) -> None:
        """Have this rank raise in its next step."""
        (self.folder / f"fails-{rank}").touch()

    def fail_loading(self, rank: int) -> None:
        """Have this rank raise when its next process loads."""
        (self.folder / f"unloadable-{rank}").touch()

    def break_link(self, rank: int) -> Callable[[], bool]:
        """Have one of this rank's links be shut down under it, at any moment; both ends notice.

        What it gives tells whether that was done."""
        file = self.folder / f"breaks-{rank}"
        file.touch()
        return lambda: not file.exists()

    def poison(self, token: int, *, aborts: bool) -> None:
        """Have any stage fail whenever it computes a prompt with this token. aborts: its process
        ends by a signal of its own, instead of raising."""
        if aborts:
            (self.folder / "aborts").touch()
        (self.folder / f"poison-{token}").touch()


def planted(folder: Path) -> Faults:
    """Faults that lie in this folder."""
    plant(folder, _PLANTED)
    return Faults(folder)
