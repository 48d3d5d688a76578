"""Stop strings in the text of one sequence, found across the borders of its tokens."""


class StopStrings:
    """Hands text on until a stop string is in it, with vLLM's meanings.

    The stop string that ends first wins; of those that end at the same character, the first in
    `stop`. So the result is the same however the text is cut into pieces. Matches that end within
    the text of the first min_tokens tokens don't count; ones that only begin there do.

    Text that may be the beginning of a stop string is held back, and no more than that. Each piece
    costs the same, whatever came before.

    stop: strings that are not empty. include_in_output: hand out the stop string too.
    """

    def __init__(self, stop: tuple[str, ...], include_in_output: bool, min_tokens: int) -> None:
        self._stop = stop
        self._include_in_output = include_in_output
        self._min_tokens = min_tokens
        self._first_characters = frozenset(string[0] for string in stop)
        # The longest end of the text so far that a stop string begins with, itself excepted.
        self._held = ""

    def push(self, piece: str, num_output_tokens: int) -> tuple[str, str | None]:
        """The text to hand out now, and the stop string that was found, if any.

        num_output_tokens counts the token that completed this piece. Once a stop string is found
        the text has ended: nothing is left to finish, and nothing may be pushed.
        """
        if not self._held and self._first_characters.isdisjoint(piece):
            return piece, None
        old = len(self._held)
        text = self._held + piece
        if num_output_tokens > self._min_tokens:
            found, end = self._first_match(text, old)
            if found is not None:
                self._held = ""
                return text[: end if self._include_in_output else end - len(found)], found
        start = self._start_of_beginning(text)
        self._held = text[start:]
        return text[:start], None

    def finish(self) -> str:
        """What was held back, when the sequence ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[str | None, int]:
        """The stop string that ends first, but after the first `old` characters, and its end."""
        found, first_end = None, len(text) + 1
        for string in self._stop:
            start = text.find(string, max(0, old + 1 - len(string)))
            if start >= 0 and start + len(string) < first_end:
                found, first_end = string, start + len(string)
        return found, first_end

    def _start_of_beginning(self, text: str) -> int:
        """Where the longest end of text starts that a stop string begins with, but isn't."""
        earliest = len(text)
        for string in self._stop:
            start = text.find(string[0], max(0, len(text) + 1 - len(string)), earliest)
            while start >= 0 and not string.startswith(text[start:]):
                start = text.find(string[0], start + 1, earliest)
            if start >= 0:
                earliest = start
        return earliest
