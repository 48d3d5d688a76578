"""A conversation: messages are read, commands obeyed, answers shown as they come."""

import asyncio
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.checkpoint.chat_template import Message
from headrace.cli.chat_answers import Answers
from headrace.cli.coroutines import run_coroutine
from headrace.errors import ServerError, UsageError

_HELP = """\
/system TEXT  sets the system prompt; without a text it is shown
/reset        forgets what was said, but not the system prompt
/save FILE    writes the conversation as JSON, a list of role and content, over what was there
/help         shows this
/exit         ends the program, as Ctrl-D does
A paste of several lines is one message. Ctrl-C stops an answer; what is typed meanwhile is kept for
the next message. Put a space before a message that begins with a slash."""

if TYPE_CHECKING:
    from headrace.cli.chat_terminal import ChatTerminal

# A model's answer must not be able to control the terminal.
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass
class Session:
    """One conversation. On a terminal it has prompts, and Ctrl-C stops answers only; otherwise
    each line is a turn, and Ctrl-C ends the program as it ends any other.

    said: what was said so far, without the system prompt.
    """

    answers: Answers
    system: str | None
    said: list[Message] = field(default_factory=list)
    # None: there is none.
    _terminal: "ChatTerminal | None" = None
    # What Ctrl-C does outside of the prompt: stops an answer, or (None) nothing.
    _stop: Callable[[], object] | None = None

    def run(self) -> int:
        """Talk until the input ends or says /exit. Returns the exit code: off a terminal 1 if a
        turn failed. Raises PipelineError if the engine breaks."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            # Imported where it is used: it takes a quarter of a second.
            from headrace.cli.chat_terminal import ChatTerminal

            self._terminal = ChatTerminal()
            _say("(/help lists what else there is, Ctrl-D leaves)")
            with self._terminal.raw(), self._interrupts():
                self._talk(self._typed(self._terminal))
            return 0
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no text are refused later, as one message among others.
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        return 0 if self._talk(line.rstrip() for line in sys.stdin if line.strip()) else 1

    def _talk(self, messages: Iterator[str]) -> bool:
        """Obey or answer each message up to /exit; whether all went well."""
        well = True
        for text in messages:
            try:
                if text.startswith("/"):
                    name, _, rest = text.partition(" ")
                    if name == "/exit":
                        break
                    self._obey(name, rest.strip())
                else:
                    run_coroutine(partial(self._turn, text))
            except (UsageError, ServerError) as error:
                well = False
                _say("headrace: " + " ".join(str(error).split()))
        return well

    @property
    def messages(self) -> list[Message]:
        """The system prompt, if there is one, and what was said."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.said

    def _typed(self, terminal: "ChatTerminal") -> Iterator[str]:
        """Each message that is not blank, up to the end of the input."""
        while True:
            try:
                message = terminal.read().rstrip()
            except KeyboardInterrupt:
                _say("(Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                return
            if message.strip():
                yield message

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
                try:
                    Path(rest).expanduser().write_text(text + "\n", encoding="utf-8")
                except (OSError, ValueError) as error:
                    reason = getattr(error, "strerror", None) or error
                    raise UsageError(f"{rest} cannot be written: {reason}") from error
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
        typing = nullcontext() if self._terminal is None else self._terminal.keys_kept(stop)
        try:
            with typing:
                async with aclosing(self.answers([*self.messages, message])) as pieces:
                    async for piece in pieces:
                        answer += piece.text
                        finish_reason = piece.finish_reason
                        self._show(piece.text)
                        # Where pieces come faster than they are shown, keys have their turn.
                        await asyncio.sleep(0)
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
        print(text if self._terminal is None else text.translate(_HARMLESS), end="", flush=True)

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Meanwhile SIGINT, from elsewhere than the keyboard, stops answers, too."""
        # It raises nowhere, or it could hit anything half done; the prompt has its own.
        previous = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_interrupt(self, number: int, frame: object) -> None:
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
