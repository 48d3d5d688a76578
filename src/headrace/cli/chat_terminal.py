"""What is typed in `headrace chat`: messages at its prompt, and keys while an answer is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output


class ChatTerminal:
    """A paste of several lines is one message (bracketed paste); the arrows fetch earlier messages,
    Ctrl-R looks for one."""

    def __init__(self) -> None:
        self._input = create_input()
        self._output = create_output()
        self._session: PromptSession[str] = PromptSession(
            "> ", input=self._input, output=self._output
        )

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Meanwhile keys come one by one, so that no line is cut, and Ctrl-C is one of them."""
        with self._input.raw_mode():
            try:
                yield
            finally:
                self._output.disable_bracketed_paste()
                self._output.flush()

    def read(self) -> str:
        """The next message. Raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D."""
        return self._session.prompt()

    @contextmanager
    def keys_kept(self, on_interrupt: Callable[[], object]) -> Iterator[None]:
        """Meanwhile, in a running event loop, keep what is typed for the next prompt; Ctrl-C calls
        back instead."""
        # The prompt has turned it off, and a paste that comes now is one message, too.
        self._output.enable_bracketed_paste()
        self._output.flush()

        def take() -> None:
            keep(self._input.read_keys())

        def keep(keys: list[KeyPress]) -> None:
            if any(press.key == Keys.ControlC for press in keys):
                on_interrupt()
            store_typeahead(self._input, [press for press in keys if press.key != Keys.ControlC])

        with self._input.attach(take):
            try:
                yield
            finally:
                keep(self._input.flush_keys())
