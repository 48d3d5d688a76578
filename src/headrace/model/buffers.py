"""Where a program's buffers lie."""

from dataclasses import dataclass, field

import torch


@dataclass
class Buffers:
    """Places of buffers, and room for their contents, which all steps share.

    A place is a buffer [T, width], or its view by heads [T, width / head_dim, head_dim]. given:
    buffers that each step brings; they have the first places.
    """

    given: tuple[str, ...]
    widths: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    _places: dict[tuple[str, int], int] = field(init=False)
    _views: dict[str, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    _room: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._places = {(name, 0): place for place, name in enumerate(self.given)}

    def place(self, name: str, head_dim: int = 0) -> int:
        """Of the buffer, or of its view by heads of this width."""
        known = self._places.get((name, head_dim))
        if known is not None:
            return known
        if head_dim:
            self.place(name)
        place = self._places[name, head_dim] = len(self._places)
        if head_dim:
            self.views(name).append((place, head_dim))
        return place

    def views(self, name: str) -> list[tuple[int, int]]:
        """Places of the buffer's views by heads, and the heads' widths; grows with them."""
        return self._views.setdefault(name, [])

    def of_step(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """All places' contents for as many tokens as the given buffers have."""
        tokens = len(given[0])
        found = list(given)
        for name, head_dim in list(self._places)[len(given) :]:
            if head_dim:
                found.append(found[self._places[name, 0]].view(tokens, -1, head_dim))
                continue
            room = self._room.get(name)
            if room is None or len(room) < tokens:
                room = torch.empty(tokens, self.widths[name], dtype=self.dtype, device=self.device)
                self._room[name] = room
            found.append(room[:tokens])
        return found
