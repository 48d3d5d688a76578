"""From the start of a server to its end, by order or otherwise."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from command import Command, run, wait_until
from serving.running_server import Server, running_server
from serving.scrape import scrape, wait_for, wait_until_idle

# Stages that take 5 ms a token, and an answer that takes far longer than its test.
MODEL = ("--model", "synthetic:5+0", "--kv-cache-memory", "64MiB")
ENDLESS = {"prompt": "w1", "max_tokens": 4000, "stream": True}


@contextmanager
def streaming(server: Server, **fields: Any) -> Iterator[Iterator[Any]]:
    """The events of a stream that has begun: the data of each, JSON or not."""

    def events() -> Iterator[Any]:
        for line in lines:
            if line:
                data = line.removeprefix("data: ")
                yield json.loads(data) if data.startswith("{") else data

    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**ENDLESS, **fields}, timeout=60.0
    ) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        found = events()
        assert "choices" in next(found)
        yield found


def error_and_end(events: Iterator[Any]) -> dict[str, Any]:
    """The error that a stream ends with."""
    *_, last, done = events
    assert done == "[DONE]"
    error: dict[str, Any] = last["error"]
    return error


def end_of(server: Server) -> tuple[int, str, str]:
    """Exit code, last line on standard output and on standard error; nothing of it is left."""
    code = server.command.process.wait(30.0)
    assert server.command.processes() == []
    assert server.command.process.stdout is not None
    lines = [*server.lines, *(s.decode() for s in server.command.process.stdout)]
    server.reader.join(30.0)
    assert not any("Traceback" in line for line in server.log)
    return code, lines[-1].rstrip(), server.log[-1].rstrip()


def send(server: Server, number: int) -> None:
    server.command.process.send_signal(number)


def refused(client: httpx.Client) -> str:
    """Why requests are not taken, which /health says too."""
    assert client.get("/health").status_code == 503
    answer = client.post("/v1/completions", json={"prompt": "w1"})
    assert answer.status_code == 503
    error: dict[str, str] = answer.json()["error"]
    assert error["type"] == "service_unavailable_error"
    assert "retry-after" in answer.headers
    return error["message"]


def test_while_it_loads_requests_are_refused_and_sigterm_ends_it_in_order() -> None:
    with running_server(*MODEL, ready=False) as server, httpx.Client(base_url=server.url) as client:
        assert "loading" in refused(client)
        assert client.get("/v1/models").status_code == 503
        # Wrong is wrong, and what needs no model is there.
        assert client.post("/v1/completions", json={"promt": "w1"}).status_code == 400
        assert client.get("/version").status_code == 200
        assert b"process_open_fds" in client.get("/metrics").content
        wait_until(lambda: bool(server.command.stages()))
        # The same one twice: of two kinds that come together, either may be taken first.
        send(server, signal.SIGTERM)
        send(server, signal.SIGTERM)
        assert end_of(server)[:2] == (128 + signal.SIGTERM, "ended in order")


def test_a_signal_before_it_listens_ends_it_in_order() -> None:
    command = Command(["serve", "--port", "0", *MODEL])
    with command:
        # The stages are started before the server itself is imported.
        wait_until(lambda: bool(command.stages()))
        for _ in range(2):
            command.process.send_signal(signal.SIGHUP)
        finished = command.finish()
    assert finished.code == 128 + signal.SIGHUP
    assert finished.out.splitlines()[-1] == "ended in order"
    assert "Traceback" not in finished.err
    assert finished.left == []


def test_a_model_that_cannot_be_loaded_ends_the_server_as_it_ends_generate() -> None:
    model = ("--model", "no-such-file.gguf")
    with ThreadPoolExecutor() as pool:
        served, generated = pool.map(
            lambda arguments: run(*arguments),
            [("serve", "--port", "0", *model), ("generate", *model, "--prompt", "a")],
        )
    assert served.left == []
    assert (served.code, served.err) == (generated.code, generated.err)
    (line,) = served.err.splitlines()
    assert line.startswith("headrace: ")
    assert "no-such-file.gguf" in line


def test_sigterm_lets_what_runs_end_and_takes_nothing_new() -> None:
    with (
        running_server(*MODEL, "--drain-timeout", "3600") as server,
        httpx.Client(base_url=server.url) as kept,
    ):
        leave_in_many_ways(server)
        assert kept.get("/health").status_code == 200
        with streaming(server, max_tokens=300, n=2) as events, ThreadPoolExecutor(1) as pool:
            # What shows the prompt's tokens needs the tokenizer until the end.
            body = {"prompt": [1], "echo": True, "max_tokens": 300}
            whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60.0)
            wait_for(server.url, num_requests_running=3.0)
            with standing_stages(server):
                send(server, signal.SIGTERM)
                wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
                assert "shutting down" in refused(kept)
                with httpx.Client(base_url=server.url) as new:
                    assert "shutting down" in refused(new)
            *rest, done = events
            reasons = [choice["finish_reason"] for e in rest for choice in e["choices"]]
            assert (reasons.count("length"), done) == (2, "[DONE]")
            assert whole.result().json()["usage"]["completion_tokens"] == 300
        # At once, since nothing is open any more, though it might go on draining for an hour.
        assert end_of(server)[:2] == (0, "ended in order")


@contextmanager
def standing_stages(server: Server) -> Iterator[None]:
    """Nothing that runs ends meanwhile."""
    stages = server.command.stages()
    for stage in stages:
        os.kill(stage, signal.SIGSTOP)
    yield
    for stage in stages:
        os.kill(stage, signal.SIGCONT)


def leave_in_many_ways(server: Server) -> None:
    """Hundreds of short requests, most of which are given up, at any moment of their lives."""
    host, port = server.url.removeprefix("http://").split(":")
    wait_until_idle(server.url)
    before = scrape(server.url)["process_open_fds"]

    def hang_up(number: int) -> None:
        # One token: often the last one comes at the very moment at which the client leaves.
        body = {"prompt": "w1 w2", "max_tokens": 1 + number % 3, "stream": number % 2 == 0}
        data = json.dumps(body).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
            )
            if number % 5:
                connection.recv(1 + number % 400)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(300)))
    wait_until_idle(server.url)
    wait_for(server.url, process_open_fds=before)


def test_what_runs_after_the_drain_timeout_is_cut_and_who_never_reads_holds_up_nothing() -> None:
    with running_server(*MODEL, "--drain-timeout", "0.5") as server, stuck_reader(server):
        with streaming(server) as events:
            # As when a supervisor ends all that belongs to a service, or a terminal is closed.
            for pid in server.command.processes():
                os.kill(pid, signal.SIGHUP)
            assert "shutting down" in error_and_end(events)["message"]
        assert end_of(server)[:2] == (0, "ended in order")
        assert any("were cut" in line for line in server.log)


@contextmanager
def stuck_reader(server: Server) -> Iterator[None]:
    """A client with more events on the way than all buffers hold, of which it takes none."""
    host, port = server.url.removeprefix("http://").split(":")
    # The prompt's log-probabilities make each of them large.
    body = {"prompt": "w1 " * 1000, "prompt_logprobs": 20, "stream": True, "n": 8,
            "max_tokens": 1, "echo": True, "logprobs": 20}  # fmt: skip
    data = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        wait_for(server.url, request_success_total=8.0)
        yield


def test_a_second_signal_ends_what_still_runs_and_a_third_changes_nothing() -> None:
    with running_server(*MODEL, "--drain-timeout", "3600") as server:
        with streaming(server) as events:
            send(server, signal.SIGINT)
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            send(server, signal.SIGINT)
            assert "shutting down" in error_and_end(events)["message"]
        send(server, signal.SIGTERM)
        assert end_of(server)[:2] == (0, "ended in order")


def test_a_request_has_its_time() -> None:
    with running_server(*MODEL, "--request-timeout", "1.5") as server:
        body = {"prompt": "w1", "max_tokens": 4000}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        assert answer.status_code == 408
        assert "--request-timeout" in answer.json()["error"]["message"]
        with streaming(server) as events:
            error = error_and_end(events)
            assert error["type"] == "timeout_error"
            assert "--request-timeout" in error["message"]
        wait_until_idle(server.url)


def test_a_stage_that_dies_ends_everything() -> None:
    with running_server(*MODEL, "-pp", "2", "--max-restarts", "0") as server:
        body = {"prompt": "w1", "max_tokens": 4000}
        with streaming(server) as events, ThreadPoolExecutor(1) as pool:
            whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60.0)
            wait_for(server.url, num_requests_running=2.0)
            os.kill(server.command.stages()[1], signal.SIGKILL)
            error = error_and_end(events)
            assert error["type"] == "service_unavailable_error"
            assert error["message"].startswith("the engine has ended: stage 1")
            assert whole.result().status_code == 503
        code, _, log = end_of(server)
        assert code == 1
        assert log.startswith("headrace: stage 1 ")
        assert "killed by signal 9" in log


def test_a_stage_that_dies_while_nothing_runs_is_noticed() -> None:
    with running_server(*MODEL, "--max-restarts", "0") as server:
        os.kill(server.command.stages()[0], signal.SIGKILL)
        code, _, log = end_of(server)
        assert code == 1
        assert log.startswith("headrace: stage 0 ")


def test_a_stage_that_stands_still_ends_everything_and_says_so() -> None:
    with running_server(*MODEL, "--stall-timeout", "1", "--max-restarts", "0") as server:
        with streaming(server) as events:
            os.kill(server.command.stages()[0], signal.SIGSTOP)
            error = error_and_end(events)
        assert error["type"] == "service_unavailable_error"
        assert server.command.process.wait(30.0) == 1
        assert server.command.processes() == []
        server.reader.join(30.0)
        lines = [line for line in server.log if line.startswith("headrace: ")]
        assert len(lines) == 1
        assert error["message"].removeprefix("the engine has ended: ") in lines[0]


def test_a_stage_that_dies_pauses_streams_which_then_go_on_and_whoever_comes_meanwhile_waits() -> (
    None
):
    with running_server(*MODEL, "-pp", "2") as server, httpx.Client(base_url=server.url) as client:
        with streaming(server, max_tokens=400) as events, ThreadPoolExecutor(1) as pool:
            first, second = server.command.stages()
            os.kill(second, signal.SIGKILL)
            wait_until(lambda: scrape(server.url)["restarts_total"] == 1.0)
            body = {"prompt": "w1", "max_tokens": 30}
            whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60.0)
            *rest, done = events
            reasons = [choice["finish_reason"] for e in rest for choice in e["choices"]]
            assert (reasons.count("length"), done) == (1, "[DONE]")
            assert whole.result().json()["usage"]["completion_tokens"] == 30
        assert client.get("/health").json() == {"status": "ok"}
        assert scrape(server.url)["recovery_seconds_total"] > 0
        assert any("restart 1 of 10" in line for line in server.log)
        now = server.command.stages()
        assert now[0] == first
        assert now[1] != second


def test_health_tells_while_the_pipeline_recovers() -> None:
    with running_server(*MODEL, "-pp", "2") as server, httpx.Client(base_url=server.url) as client:
        first, second = server.command.stages()
        # It lives, but takes no note of the new epoch until it is replaced.
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: client.get("/health").json()["status"] == "recovering")
        assert "killed by signal 9" in client.get("/health").json()["cause"]
        wait_until(lambda: client.get("/health").json()["status"] == "ok")
        answer = client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 3})
        assert answer.status_code == 200


def test_beyond_the_limit_the_last_line_says_that_it_gave_up() -> None:
    with running_server(*MODEL, "-pp", "2", "--max-restarts", "1") as server:
        with streaming(server) as events:
            for count in (1, 2):
                os.kill(server.command.stages()[1], signal.SIGKILL)
                if count == 1:
                    wait_until(lambda: scrape(server.url)["restarts_total"] == 1.0)
                    wait_until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "ok"})
            error = error_and_end(events)
        assert error["type"] == "service_unavailable_error"
        code, _, log = end_of(server)
        assert code == 1
        assert log.startswith("headrace: stage 1 ")
        assert "gave up after 1 restarts in 600 s (--max-restarts)" in log
