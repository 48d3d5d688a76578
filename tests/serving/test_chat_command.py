"""`headrace chat --url` at a real server."""

from urllib.request import urlopen

from command import wait_until
from serving.running_server import Server
from terminal import Terminal


def sample(server: Server, name: str) -> float:
    """The sum of a metric's lines that begin so."""
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_ctrl_c_in_the_terminal_ends_the_request_on_the_server(server: Server) -> None:
    aborted = 'headrace:request_success_total{finished_reason="abort"'
    before = sample(server, aborted)
    with Terminal("--url", server.url, "--temperature", "0") as terminal:
        for message in ("hello", "and again"):
            terminal.see("> ")
            terminal.type(message + "\n")
            terminal.see_answer()
            terminal.type("\x03")
            terminal.see("(stopped)", "> ")
        wait_until(lambda: sample(server, aborted) == before + 2)
        terminal.type("/exit\n")
        assert terminal.end() == 0
