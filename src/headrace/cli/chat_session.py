"""A conversation in the terminal: lines are read, commands obeyed, answers shown as they come."""

import asyncio
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace.checkpoint.chat_template import Message
from headrace.cli.chat_answers import Answers
from headrace.errors import ServerError, UsageError

_HELP = """\
/system TEXT  sets the system prompt; without a text it is shown
/reset        forgets what was said, but not the system prompt
/save FILE    writes the conversation as JSON, a list of role and content
/help         shows this
/exit         ends the program, as Ctrl-D does
Ctrl-C stops an answer. Put a space before a message that begins with a slash."""

# A model's answer must not be able to control the terminal.
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass
class Session:
    """One conversation. On a terminal it has prompts, and Ctrl-C stops answers only; otherwise
    each line is a turn, and Ctrl-C ends the program as it ends any other."""

    answers: Answers
    system: str | None
    on_terminal: bool = field(default_factory=lambda: sys.stdin.isatty() and sys.stdout.isatty())
    said: list[Message] = field(default_factory=list)
    # What Ctrl-C does: ends the reading of a line, or stops an answer, or (None) nothing.
    _reading: bool = False
    _stop: Callable[[], object] | None = None

    def run(self) -> int:
        """Talk until the input ends or says /exit. Returns the exit code: off a terminal 1 if a
        turn failed. Raises PipelineError if the engine breaks."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no text are refused later, as one message among others.
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        failed = False
        with self._interrupts():
            for line in self._lines():
                try:
                    if line.startswith("/"):
                        name, _, rest = line.partition(" ")
                        if name == "/exit":
                            break
                        self._obey(name, rest.strip())
                    else:
                        asyncio.run(self._turn(line))
                except (UsageError, ServerError, OSError, ValueError) as error:
                    failed = True
                    _say("headrace: " + " ".join(str(error).split()))
        return 1 if failed and not self.on_terminal else 0

    @property
    def messages(self) -> list[Message]:
        """The system prompt, if there is one, and what was said."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.said

    def _lines(self) -> Iterator[str]:
        """Each line that is not blank, up to the end of the input."""
        if not self.on_terminal:
            yield from (line.rstrip() for line in sys.stdin if line.strip())
            return
        # Imported for what it does to input(): editing, and the arrows that fetch earlier lines.
        with suppress(ImportError):
            import readline  # noqa: F401
        while True:
            try:
                self._reading = True
                line = input("> ").rstrip()
            except KeyboardInterrupt:
                _say("\n(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                print()
                return
            finally:
                self._reading = False
            if line.strip():
                yield line

    def _obey(self, name: str, rest: str) -> None:
        match name:
            case "/system" if rest:
                self.system = _checked(rest)
            case "/system":
                _say("(no system prompt)" if self.system is None else self.system)
            case "/reset":
                self.said.clear()
            case "/save" if rest:
                text = json.dumps(self.messages, ensure_ascii=False, indent=1)
                Path(rest).expanduser().write_text(text + "\n", encoding="utf-8")
                _say(f"(wrote {rest})")
            case "/save":
                raise UsageError("/save needs the name of a file")
            case "/help":
                _say(_HELP)
            case _:
                raise UsageError(f"there is no command {name}: /help shows those there are")

    async def _turn(self, text: str) -> None:
        """Show the answer to a message, and remember both if anything was answered."""
        message = {"role": "user", "content": _checked(text.strip())}
        answer = ""
        finish_reason = None
        stopped = False
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop() -> None:
            nonlocal stopped
            # Once: a second time would break off what the first one has to clean up.
            if not stopped:
                stopped = True
                task.cancel()

        self._stop = partial(loop.call_soon_threadsafe, stop)
        try:
            async with aclosing(self.answers([*self.messages, message])) as pieces:
                async for piece in pieces:
                    answer += piece.text
                    finish_reason = piece.finish_reason
                    self._show(piece.text)
        except asyncio.CancelledError:
            if not stopped:
                raise
        finally:
            self._stop = None
            if answer or finish_reason is not None:
                print(flush=True)
                self.said += [message, {"role": "assistant", "content": answer}]
        if stopped:
            _say("(stopped)" if answer else "(stopped before it began, and forgotten)")
        elif finish_reason == "length":
            _say("(cut off: no more tokens were allowed, or the context is full)")

    def _show(self, text: str) -> None:
        print(text.translate(_HARMLESS) if self.on_terminal else text, end="", flush=True)

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Meanwhile, on a terminal, Ctrl-C never ends the program."""
        if not self.on_terminal:
            yield
            return
        # One handler throughout, so that there is no moment at which another one is in force. It
        # raises nowhere but at the prompt: elsewhere it could hit anything half done.
        previous = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_interrupt(self, number: int, frame: object) -> None:
        if self._reading:
            self._reading = False
            raise KeyboardInterrupt
        if self._stop is not None:
            self._stop()


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the line is not UTF-8 text, and was left out") from None
    return text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
