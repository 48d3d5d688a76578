"""Who may ask: keys, certificates, addresses and other sites' pages."""

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import typer
from starlette.types import Message, Receive, Scope, Send

from command import run, wait_until
from headrace.cli import app
from headrace.errors import StartError, UsageError
from headrace.serving.access import KeyCheck, caller_salt
from headrace.serving.listener import listen
from headrace.serving.settings import ServerSettings
from serving.running_server import Server, running_server

KEYS = ("sk-first-4711", "sk-second-0815")
SITE = "https://chat.example"
MODEL = ("--model", "synthetic:1+0", "--kv-cache-memory", "16MiB")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=headrace test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@pytest.fixture(scope="module")
def locked(certificate: tuple[Path, Path]) -> Iterator[Server]:
    """A server with keys, HTTPS, and one other site whose pages may use it."""
    with running_server(
        *MODEL,
        *(argument for key in KEYS for argument in ("--api-key", key)),
        *("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1])),
        *("--allowed-origins", f'["{SITE}"]', "--allowed-methods", '["POST"]'),
        *("--allowed-headers", '["authorization", "content-type"]', "--allow-credentials"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(locked: Server, certificate: tuple[Path, Path]) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=certificate[0])
    with httpx.Client(base_url=locked.url, verify=trusted) as made:
        yield made


def ask(client: httpx.Client, **headers: str) -> httpx.Response:
    body = {"prompt": "w1", "max_tokens": 1}
    return client.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("key", KEYS, ids=["first", "second"])
def test_any_of_the_keys_opens_the_api(client: httpx.Client, key: str) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert ask(client, authorization=f"{scheme} {key}").status_code == 200


WRONG: dict[str, dict[bytes, bytes]] = {
    "none": {},
    "empty": {b"authorization": b""},
    "wrong": {b"authorization": b"Bearer sk-third"},
    "longer": {b"authorization": b"Bearer %bx" % KEYS[0].encode()},
    "shorter": {b"authorization": b"Bearer " + KEYS[0][:-1].encode()},
    "both": {b"authorization": b"Bearer " + " ".join(KEYS).encode()},
    "no scheme": {b"authorization": KEYS[0].encode()},
    "other scheme": {b"authorization": b"Basic " + KEYS[0].encode()},
    "other header": {b"x-api-key": KEYS[0].encode()},
    "not ascii": {b"authorization": "Bearer é".encode()},
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_without_one_nothing_is_answered(client: httpx.Client, headers: dict[bytes, bytes]) -> None:
    body = {"prompt": "w1", "max_tokens": 1}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert not any(key in answer.text for key in KEYS)
    # Not even whether a path exists, or what is wrong with a body.
    for method, path in (("GET", "/v1/models"), ("GET", "/nowhere"), ("POST", "/tokenize")):
        assert client.request(method, path, headers=headers).status_code == 401


def cached(client: httpx.Client, prompt: str, key: str, **fields: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_prefix_cache_tells_no_key_what_another_sent(client: httpx.Client) -> None:
    prompt = "w3 " * 40
    first, second = KEYS
    assert [cached(client, prompt, key) for key in (first, second, first, second)] == [0, 0, 32, 32]
    # Nor one who names the other's salt, as far as it can be known.
    salted = [cached(client, prompt, key, cache_salt=salt) for key, salt in (
        (first, "a"), (second, "a"), (first, "b"), (first, "a"), (second, first), (first, second),
    )]  # fmt: skip
    assert salted == [0, 0, 0, 32, 0, 0]


def test_a_priority_needs_a_policy_that_allows_it(client: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    for path, what in (
        ("/v1/completions", {"prompt": "w1"}),
        ("/v1/completions", {"prompt": ["w1", "w2"], "stream": True}),
    ):
        body = {**what, "max_tokens": 1, "priority": 5}
        answer = client.post(path, json=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"
        assert "--scheduling-policy" in answer.json()["error"]["message"]
        body["priority"] = 0
        assert client.post(path, json=body, headers=headers).status_code == 200


def test_keys_share_a_prefix_cache_by_choice_and_one_key_has_its_own() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        salts.append(caller_salt.get())

    async def no_body() -> Message:
        raise AssertionError

    async def no_answer(message: Message) -> None:
        raise AssertionError

    def ask_with(check: KeyCheck, key: str) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "path": "/v1/completions", "headers": headers}
        asyncio.run(check(scope, no_body, no_answer))

    for keys, shared in ((KEYS, True), (KEYS[:1], False), (KEYS[:1] * 2, False), (KEYS, False)):
        salts: list[bytes] = []
        check = KeyCheck(app, keys, shared, lambda status: None)
        for key in keys:
            ask_with(check, key)
        apart = keys == KEYS and not shared
        assert len(set(salts)) == 1 + apart
        assert (b"" in salts) != apart


def test_probes_and_scrapers_need_no_key(client: httpx.Client) -> None:
    for path in ("/health", "/metrics", "/version"):
        assert client.get(path).status_code == 200


def test_keys_are_written_nowhere(locked: Server, client: httpx.Client) -> None:
    ask(client, authorization="Bearer sk-third")
    texts = [*locked.lines, *locked.log, client.get("/metrics").text]
    for stage in locked.command.stages():
        process = psutil.Process(stage)
        texts += [*process.cmdline(), *process.environ().values()]
    texts.append(repr(ServerSettings(served_model_names=("m",), api_keys=KEYS)))
    assert len(texts) > 10
    assert not any(key in text for key in (*KEYS, "sk-third") for text in texts)


def test_a_key_from_the_environment_counts_and_reaches_no_stage_and_the_url_may_be_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        host = "::1"
    except OSError:
        host = "127.0.0.1"
    with running_server(*MODEL, "--host", host, ready=False, HEADRACE_API_KEY=KEYS[0]) as server:
        assert server.url.startswith(f"http://[{host}]:" if ":" in host else f"http://{host}:")
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        # The model is not there yet, but the key is right.
        right = {"authorization": f"Bearer {KEYS[0]}"}
        assert httpx.get(f"{server.url}/v1/models", headers=right).status_code == 503
        wait_until(lambda: bool(server.command.stages()))
        environment = psutil.Process(server.command.stages()[0]).environ()
        assert not any(KEYS[0] in value for value in environment.values())


@pytest.mark.parametrize("key", ["", " ", "two\nlines", " sk-1", "sk-1 "])
def test_a_key_that_nobody_could_send_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        ServerSettings(served_model_names=("m",), api_keys=(key,))


def test_an_empty_key_in_the_environment_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "")
    with pytest.raises(UsageError, match="HEADRACE_API_KEY"):
        serve()


def test_pages_of_the_allowed_site_are_let_in_without_a_key_for_the_question(
    client: httpx.Client,
) -> None:
    asked = {"origin": SITE, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    allowed = client.options("/v1/completions", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == SITE
    assert allowed.headers["access-control-allow-credentials"] == "true"
    assert allowed.headers["access-control-allow-methods"] == "POST"
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    for wrong in (
        {"origin": "https://evil.example"},
        {"access-control-request-method": "DELETE"},
        {"access-control-request-headers": "x-other"},
    ):
        assert client.options("/v1/completions", headers={**asked, **wrong}).status_code == 400


def test_pages_of_the_allowed_site_may_read_answers_and_errors(client: httpx.Client) -> None:
    for headers, status in (({"authorization": f"Bearer {KEYS[0]}"}, 200), ({}, 401)):
        answer = ask(client, origin=SITE, **headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == SITE
        other = ask(client, origin="https://evil.example", **headers)
        assert "access-control-allow-origin" not in other.headers


def test_a_stream_comes_over_https_and_http_is_not_answered(
    client: httpx.Client, locked: Server
) -> None:
    assert locked.url.startswith("https://")
    body = {"prompt": "w1", "max_tokens": 3, "stream": True}
    right = {"authorization": f"Bearer {KEYS[1]}"}
    assert "[DONE]" in client.post("/v1/completions", json=body, headers=right).text
    with pytest.raises(httpx.TransportError):
        httpx.get(locked.url.replace("https", "http") + "/health")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{locked.url}/health")
    assert httpx.get(f"{locked.url}/health", verify=False).status_code == 200


def serve(*arguments: str) -> None:
    """The command in this process, on a free port."""
    command = ["serve", *MODEL, "--port", "0", *arguments]
    typer.main.get_command(app).main(command, standalone_mode=False)


def test_a_certificate_that_cannot_be_used_is_told_before_anything_else(
    certificate: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pem"
    other.write_text("no certificate\n")
    missing = tmp_path / "missing.pem"
    for file in (missing, other, certificate[0]):
        with pytest.raises(UsageError) as caught:
            serve("--ssl-certfile", str(file))
        assert str(file) in str(caught.value)
    with pytest.raises(UsageError) as caught:
        serve("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(other))
    assert str(other) in str(caught.value)
    with pytest.raises(UsageError, match="--ssl-certfile"):
        serve("--ssl-keyfile", str(certificate[1]))
    assert capsys.readouterr().out == ""


def test_a_model_is_given_once() -> None:
    command = typer.main.get_command(app)
    for name in ("serve", "generate"):
        with pytest.raises(UsageError, match=f"headrace {name} smollm2"):
            command.main([name], standalone_mode=False)
    with pytest.raises(UsageError, match="'other' and --model 'synthetic:1"):
        serve("other")


def test_a_port_in_use_is_one_line_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        finished = run("serve", *MODEL, "--port", port)
    assert (finished.code, finished.out, finished.left) == (1, "", [])
    (line,) = finished.err.splitlines()
    assert line.startswith(f"headrace: cannot listen on 127.0.0.1:{port}")
    assert "--port" in line


def test_an_address_that_is_not_this_machines_is_told() -> None:
    with pytest.raises(StartError, match=r"192\.0\.2\.1.*--host"):
        listen(ServerSettings(served_model_names=("m",), host="192.0.2.1", port=0))
