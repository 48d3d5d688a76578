"""Stop strings in the text of one sequence, found across the borders of its tokens."""

from array import array

from headrace.patterns import Patterns


class StopPatterns:
    """A request's stop strings, none of them empty, made ready once for all of its completions.

    first_characters: what they begin with. Of each state (see Patterns) found: the place in strings
    of the one that ends there, the first of several, or -1; held: the state for the longest end
    that a stop string begins with but isn't, which has to be held back.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self.first_characters = frozenset(string[0] for string in strings)
        self.patterns = patterns = Patterns([list(map(ord, string)) for string in strings])
        self.found = array("i", [-1]) * len(patterns)
        self.held = array("i", [0]) * len(patterns)
        for place in range(len(strings) - 1, -1, -1):
            self.found[patterns.ends[place]] = place
        for state in range(1, len(patterns)):
            shorter = patterns.shorter[state]
            ending = [place for s in (state, shorter) if (place := self.found[s]) >= 0]
            self.found[state] = min(ending, default=-1)
            self.held[state] = state if patterns.inner[state] else self.held[shorter]


class StopStrings:
    """Hands text on until a stop string is in it, with vLLM's meanings.

    The stop string that ends first wins; of those that end at the same character, the first in
    the list. So the result is the same however the text is cut into pieces. Matches that end within
    the text of the first min_tokens tokens don't count; ones that only begin there do.

    Text that may be the beginning of a stop string is held back, and no more than that. A piece
    costs as much as it is long, however many stop strings there are.

    include_in_output: hand out the stop string too.
    """

    def __init__(self, stop: StopPatterns, include_in_output: bool, min_tokens: int) -> None:
        self._stop = stop
        self._include_in_output = include_in_output
        self._min_tokens = min_tokens
        # The longest end of the text so far that a stop string begins with, itself excepted.
        self._held = ""
        self._state = 0

    def push(self, piece: str, num_output_tokens: int) -> tuple[str, str | None]:
        """The text to hand out now, and the stop string that was found, if any.

        num_output_tokens counts the token that completed this piece. Once a stop string is found
        the text has ended: nothing is left to finish, and nothing may be pushed.
        """
        stop = self._stop
        if not self._held and stop.first_characters.isdisjoint(piece):
            return piece, None
        step, found = stop.patterns.step, stop.found
        counts = num_output_tokens > self._min_tokens
        text = self._held + piece
        state = self._state
        for end, character in enumerate(piece, len(self._held) + 1):
            if not state and character not in stop.first_characters:
                continue
            state = step(state, ord(character))
            if counts and found[state] >= 0:
                string = stop.strings[found[state]]
                self._held, self._state = "", 0
                return text[: end if self._include_in_output else end - len(string)], string
        self._state = stop.held[state]
        start = len(text) - stop.patterns.depth[self._state]
        self._held = text[start:]
        return text[:start], None

    def finish(self) -> str:
        """What was held back, when the sequence ends otherwise."""
        held, self._held, self._state = self._held, "", 0
        return held
