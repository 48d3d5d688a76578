"""Many patterns looked for at once, in time that depends on what is read and not on how many there
are: the automaton of Aho and Corasick (1975)."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

_SYMBOL_BITS = 32
_SYMBOL = 2**_SYMBOL_BITS - 1


class Patterns:
    """Patterns of whole numbers below 2**32, as a tree of their beginnings.

    A state is a node of that tree: the longest end of what was read that some pattern begins with;
    0 is the root, where nothing is. Nodes are numbered by depth, so that whatever a node has of
    shorter ends is known before it. Some 20 bytes a node.

    ends: each pattern's node, by its place in the patterns. depth: of each node. shorter: the node
    of the longest end of each node that is shorter than it (the root's is the root). inner: whether
    some pattern goes on after the node.
    """

    def __init__(self, patterns: Sequence[Sequence[int]]) -> None:
        self.ends = array("i", [0]) * len(patterns)
        self.depth = array("i", [0])
        # Of each node but the root, its parent and what leads to it; ascending.
        self._edges = array("Q")
        growing = list(range(len(patterns)))
        for level in range(max(map(len, patterns), default=0)):
            growing = [place for place in growing if len(patterns[place]) > level]
            edges = {p: self.ends[p] << _SYMBOL_BITS | patterns[p][level] for p in growing}
            new = sorted(set(edges.values()))
            nodes = {edge: number for number, edge in enumerate(new, len(self.depth))}
            self._edges.extend(new)
            self.depth.extend([level + 1] * len(new))
            for place, edge in edges.items():
                self.ends[place] = nodes[edge]
        self.shorter = array("i", [0]) * len(self.depth)
        self.inner = bytearray(len(self.depth))
        for node, edge in enumerate(self._edges, 1):
            parent = edge >> _SYMBOL_BITS
            self.inner[parent] = True
            if parent:
                self.shorter[node] = self.step(self.shorter[parent], edge & _SYMBOL)

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self.depth)

    def step(self, state: int, symbol: int) -> int:
        """The state after one more symbol. Over any run of symbols: at most two looks for each."""
        while not (node := self._child(state, symbol)) and state:
            state = self.shorter[state]
        return node

    def _child(self, node: int, symbol: int) -> int:
        """The node that the symbol leads to; 0 for none."""
        edge = node << _SYMBOL_BITS | symbol
        place = bisect_left(self._edges, edge)
        found = place < len(self._edges) and self._edges[place] == edge
        return place + 1 if found else 0
