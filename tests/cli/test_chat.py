"""`headrace chat` as a user runs it: on a terminal and in a pipe, with a model and a server."""

import json
import signal
from pathlib import Path

import psutil
import pytest
import typer

from command import Command, run
from fake_server import fake_server
from headrace.cli import app
from headrace.errors import HeadraceError, ServerError, UsageError
from terminal import PASTE, Terminal
from tiny_checkpoints import CHAT_TEMPLATE, write_tiny_gguf

# On few and busy cores threads would wait for each other at every one of its tiny kernels.
TINY = ["--cpu-threads", "1", "--cpu-bind", "none", "--temperature", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chat") / "model.gguf"
    return str(write_tiny_gguf(path, max_positions=4000, chat_template=CHAT_TEMPLATE))


def test_each_line_of_a_pipe_is_a_turn_and_only_answers_go_to_standard_output(
    model: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    lines = [
        "/system", "/system be brief", "/system", "hello", "", "more", f"/save {first}", "/nothing",
        "x" * 300, "/reset", " /slash", f"/save {second}", f"/save {tmp_path}", "/exit", "never",
    ]  # fmt: skip
    finished = run(
        "chat", "--model", model, *TINY, "--max-tokens", "5", "--max-model-len", "256",
        stdin="\n".join(lines).encode(),
    )  # fmt: skip
    told = json.loads(first.read_text(encoding="utf-8"))
    assert [m["role"] for m in told] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in told if m["role"] != "assistant"] == ["be brief", "hello", "more"]
    after = json.loads(second.read_text(encoding="utf-8"))
    assert [m["role"] for m in after] == ["system", "user", "assistant"]
    assert after[1]["content"] == "/slash"
    answers = [m["content"] for m in told + after[1:] if m["role"] == "assistant"]
    assert finished.out == "".join(answer + "\n" for answer in answers)
    assert "(no system prompt)\nbe brief\n" in finished.err
    assert "there is no command /nothing" in finished.err
    assert "the context 256: /reset forgets what was said" in finished.err
    assert "Is a directory" in finished.err
    # Some lines failed, which the pipe's owner would not know otherwise.
    assert finished.code == 1
    assert finished.left == []


def test_ctrl_c_stops_the_answer_and_never_the_program(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "said.json"
    with Terminal("--model", model, *TINY) as terminal:
        terminal.see("> ")
        terminal.type("hello\n")
        terminal.see_answer()
        terminal.type("\x03\x03")
        terminal.see("(stopped)", "> ")
        terminal.type(f"/save {saved}\n")
        terminal.see("(wrote", "> ")
        user, assistant = json.loads(saved.read_text(encoding="utf-8"))
        assert user == {"role": "user", "content": "hello"}
        assert assistant["role"] == "assistant"
        assert assistant["content"]
        terminal.type("half a li")
        terminal.see("half a li")
        terminal.type("\x03")
        terminal.see("(Ctrl-D or /exit leaves)", "> ")
        # The engine runs one sequence at a time: had the first not ended, this one would wait.
        terminal.type("again\n")
        terminal.see_answer()
        terminal.type("\x03")
        terminal.see("(stopped)", "> ")
        (stage,) = psutil.Process(terminal.process.pid).children()
        stage.kill()
        # Another one takes its place.
        terminal.type("and now\n")
        terminal.see("was killed by signal 9", "are there again after")
        terminal.type("\x03")
        terminal.see("(stopped", "> ")
        terminal.type("go on\n")
        terminal.see_answer()
        terminal.type("\x03")
        terminal.see("(stopped)", "> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown
        assert not stage.is_running()


def test_a_server_is_told_the_whole_conversation_and_its_errors_are_one_line() -> None:
    with fake_server({1: "status", 2: "error"}) as server:
        finished = run(
            *("chat", "--url", f"{server.url}/v1/", "--system-prompt", "be kind"),
            *("--temperature", "0.5", "--max-tokens", "3"),
            stdin="hi\nrefused\nbroken\n\xff\nbye".encode("latin-1"),
            HEADRACE_API_KEY="s3cret",
        )
    assert finished.code == 1
    # What came of an answer that broke off is kept.
    assert finished.out == " 0 1 2\n 0\n 0 1 2\n"
    notes = finished.err.splitlines()
    assert len(notes) == 5
    assert "by far (/reset forgets what was said)" in notes[1]
    assert "the pipeline broke" in notes[2]
    assert "not UTF-8" in notes[3]
    assert "cut off" in notes[0]
    last = server.asked[-1]
    assert last["model"] == "fake"
    assert (last["temperature"], last["max_tokens"], "top_p" in last) == (0.5, 3, False)
    assert last["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": " 0 1 2"},
        {"role": "user", "content": "broken"},
        {"role": "assistant", "content": " 0"},
        {"role": "user", "content": "bye"},
    ]
    assert set(server.keys) == {"Bearer s3cret"}


def test_ctrl_c_hangs_up_on_the_server_and_keeps_what_it_said() -> None:
    arguments = ["--model-name", "other", "--max-tokens", "1000000"]
    with fake_server() as server, Terminal("--url", server.url, *arguments) as terminal:
        terminal.see("> ")
        terminal.type("count\n")
        terminal.see(" 0 1 2")
        terminal.type("\x03")
        terminal.see("(stopped)", "> ")
        assert server.hung_up.wait(30)
        terminal.type("again\n")
        terminal.see(" 0 1 2")
        asked, said, _ = server.asked[-1]["messages"]
        assert asked == {"role": "user", "content": "count"}
        assert said["content"].startswith(" 0 1 2")
        assert server.asked[-1]["model"] == "other"
        terminal.type("\x03")
        terminal.see("(stopped)", "> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_a_paste_is_one_message_whole_also_while_an_answer_is_shown() -> None:
    arguments = ["--max-tokens", "1000000"]
    # More than a terminal keeps of a line, if it keeps lines.
    long = "\r".join("and on " * 20 for _ in range(60))
    with fake_server() as server, Terminal("--url", server.url, *arguments) as terminal:
        terminal.see("> ")
        terminal.type(PASTE.format("one\rtwo") + "\r")
        terminal.see(" 0 1 2")
        terminal.type(PASTE.format(long) + "!")
        terminal.type("\x03")
        # Too long for the screen, so its end is shown.
        terminal.see("(stopped)", "on !")
        terminal.type("\r")
        terminal.see(" 0 1 2")
        terminal.type("\x03")
        terminal.see("(stopped)", "> ")
        # The arrow fetches what was said before.
        terminal.type("\x1b[A\r")
        terminal.see(" 0 1 2")
        said = [m["content"] for m in server.asked[-1]["messages"] if m["role"] == "user"]
        whole = long.replace("\r", "\n") + "!"
        assert said == ["one\ntwo", whole, whole]


def test_without_a_terminal_ctrl_c_ends_the_program() -> None:
    arguments = ["chat", "--max-tokens", "1000000", "--url"]
    with fake_server() as server, Command([*arguments, server.url]) as command:
        assert command.process.stdin is not None
        command.process.stdin.write(b"count\n")
        command.process.stdin.flush()
        assert command.process.stdout is not None
        assert command.process.stdout.read(2) == b" 0"
        command.process.send_signal(signal.SIGINT)
        finished = command.finish()
        assert server.hung_up.wait(30)
    assert finished.code == 130
    assert finished.err == ""


@pytest.mark.parametrize("command", [[], ["serve"], ["bench"], ["bench", "scheduler"]])
def test_h_is_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        typer.main.get_command(app).main([*command, flag], standalone_mode=False)
    short, long = capsys.readouterr().out.split("Usage: ")[1:]
    assert short == long


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ([], UsageError, "a model .runs it here. or --url"),
        (
            ["--model", "smollm2", "--url", "http://127.0.0.1:1"],
            UsageError,
            "a model .runs it here. or --url",
        ),
        (["--url", "http://127.0.0.1:1", "--dtype", "float32"], UsageError, "--dtype does not go"),
        (["--model", "smollm2", "--api-key", "k"], UsageError, "--api-key does not go"),
        (["--url", "http://127.0.0.1:1", "--top-p", "2"], UsageError, "top_p must be"),
        (["--url", "nowhere"], UsageError, "no server's address"),
        (["--url", "http://127.0.0.1:1"], ServerError, "cannot be reached"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_said(
    arguments: list[str], kind: type[HeadraceError], message: str
) -> None:
    command = typer.main.get_command(app)
    with pytest.raises(kind, match=message):
        command.main(["chat", *arguments], standalone_mode=False)
