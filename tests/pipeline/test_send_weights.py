"""Weights from a host that has them to one that lacks them: cut off, damaged, hostile, refused."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.checkpoint.stage_files import files_identity, piece_digest, read_piece, stage_files
from headrace.errors import ModelError, StartError
from headrace.host.cluster_key import Secret
from headrace.pipeline import weights_receiver, weights_sender
from headrace.pipeline.curve import Gate, open_door
from headrace.pipeline.weights_receiver import Received, Source, receive_weights
from headrace.pipeline.weights_sender import WEIGHTS, WeightsSender
from headrace.protocol import send_weights
from headrace.protocol.model_config import StageShare
from headrace.protocol.program import Program
from headrace.protocol.send_weights import Answer, AskPiece, Offer
from headrace.protocol.stage_files import FileSize, Piece, StageFiles
from pipeline.test_curve import junk
from stage_models import read_model, whole
from tiny_checkpoints import write_tiny_gguf

SECRET, OTHER = Secret(b"\1" * 32), Secret(b"\2" * 32)
HERE = "127.0.0.1"
SOME_LAYERS = StageShare(20, 23, embeds=False, samples=False)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return locate_model("smollm2")


@pytest.fixture(scope="module")
def program(files: ModelFiles) -> Program:
    return read_model(files).program(SOME_LAYERS)


@pytest.fixture
def sender(files: ModelFiles) -> Iterator[WeightsSender]:
    sender = WeightsSender(files, "weights", SECRET, HERE)
    yield sender
    sender.close()


@pytest.fixture
def pieces_read(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Those that senders read, in order, from the first that is asked for on."""
    seen = list[Piece]()

    def watched(files: ModelFiles, piece: Piece) -> bytes:
        seen.append(piece)
        return read_piece(files, piece)

    monkeypatch.setattr(weights_sender, "read_piece", watched)
    return seen


def receive(
    address: str, program: Program, folder: Path, secret: Secret = SECRET, **calls: Any
) -> Received:
    calls = {"on_progress": lambda _: None, "check": lambda: None} | calls
    return receive_weights(Source(address, secret), program, folder, **calls)


class Interrupted(Exception):
    pass


def interrupt_at(part: float) -> Callable[[float], None]:
    def on_progress(done: float) -> None:
        if done > part:
            raise Interrupted

    return on_progress


def test_an_interrupted_transfer_is_resumed_and_not_begun_anew(
    sender: WeightsSender,
    files: ModelFiles,
    program: Program,
    tmp_path: Path,
    pieces_read: list[Piece],
) -> None:
    wanted = stage_files(files, program)
    total = sum(piece.nbytes for piece in wanted.pieces)
    first = WeightsSender(files, "weights", SECRET, HERE)
    with pytest.raises(Interrupted):
        receive(first.address(), program, tmp_path, on_progress=interrupt_at(0.5))
    # It may still be at what was asked for ahead.
    first.close()
    pieces_read.clear()
    parts: list[float] = []
    received = receive(sender.address(), program, tmp_path, on_progress=parts.append)
    assert 0.5 * total < received.there < 0.9 * total
    assert received.came + received.there == total
    assert sum(piece.nbytes for piece in pieces_read) == received.came
    assert parts == sorted(parts)
    assert parts[-1] == 1
    pieces_read.clear()
    assert receive(sender.address(), program, tmp_path).came == 0
    assert pieces_read == []


class Cutter:
    """A way to an address that is cut whenever so many bytes came back over it."""

    def __init__(self, address: str, after: int) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._target, self._after = (host, int(port)), after
        self._listener = socket.create_server((HERE, 0))
        self.address = f"tcp://{HERE}:{self._listener.getsockname()[1]}"
        self.carried, self.cuts = 0, 0
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()
                self._carry_back(far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def _carry_back(self, source: socket.socket, target: socket.socket) -> None:
        left = self._after
        with suppress(OSError):
            while left > 0 and (data := source.recv(1 << 16)):
                target.sendall(data)
                left -= len(data)
                self.carried += len(data)
        self.cuts += left <= 0
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def test_a_transfer_goes_on_by_itself_when_the_line_is_cut(
    sender: WeightsSender, program: Program, tmp_path: Path, pieces_read: list[Piece]
) -> None:
    cutter = Cutter(sender.address(), 4 << 20)
    try:
        received = receive(cutter.address, program, tmp_path)
    finally:
        cutter.close()
    assert cutter.cuts >= 2
    # What was on its way at each cut comes once more, and no more than that.
    ahead = 4 * (1 << 22)
    assert received.came <= sum(piece.nbytes for piece in pieces_read)
    assert cutter.carried <= 1.1 * received.came + cutter.cuts * ahead
    assert receive(sender.address(), program, tmp_path).came == 0


def test_another_model_of_the_same_shape_is_kept_apart(tmp_path: Path) -> None:
    share = StageShare(2, 4, embeds=False, samples=True)
    folders = set()
    for seed in (0, 1):
        model = ModelFiles(write_tiny_gguf(tmp_path / "model.gguf", seed=seed), "gguf")
        sender = WeightsSender(model, f"digest {seed}", SECRET, HERE)
        try:
            received = receive(
                sender.address(), read_model(model).program(share), tmp_path / "received"
            )
        finally:
            sender.close()
        assert received.there == 0
        folders.add(received.files.path)
    assert len(folders) == 2


def test_the_identity_tells_files_apart_that_differ_in_their_headers(tmp_path: Path) -> None:
    def identity(**options: Any) -> str:
        path = write_tiny_gguf(tmp_path / "model.gguf", **options)
        return files_identity(ModelFiles(path, "gguf"), "weights")

    assert identity() == identity()
    assert identity() != identity(max_positions=256)


def test_who_has_another_key_gets_nothing_and_strangers_harm_nobody(
    sender: WeightsSender, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = junk(sender.address(), 200)
    monkeypatch.setattr(weights_receiver, "_PATIENCE_S", 1.0)
    with pytest.raises(StartError, match=r"no weights came from tcp://.* is a firewall between"):
        receive(sender.address(), program, tmp_path, OTHER)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert receive(sender.address(), program, tmp_path).came > 0
    for connection in strangers:
        connection.close()


@pytest.mark.parametrize(
    "piece",
    [
        Piece("../secret", 0, 10),
        Piece("/etc/passwd", 0, 10),
        Piece("secret", 0, 10),
        Piece("model.gguf", -1, 10),
        Piece("model.gguf", 1 << 62, 10),
        Piece("model.gguf", 1 << 61, 10),
        Piece("model.gguf", 0, 1 << 40),
        Piece("model.gguf", 0, -1),
    ],
)
def test_nothing_but_the_models_files_is_sent(tmp_path: Path, piece: Piece) -> None:
    for folder in (tmp_path, tmp_path / "model"):
        folder.mkdir(exist_ok=True)
        (folder / "secret").write_text("not for others")
    model = ModelFiles(write_tiny_gguf(tmp_path / "model" / "model.gguf"), "gguf")
    sender = WeightsSender(model, "weights", SECRET, HERE)
    context = zmq.Context()
    connection = weights_receiver._Connection(
        context, Source(sender.address(), SECRET), lambda: None
    )
    try:
        with pytest.raises(ModelError, match="does not send it"):
            list(connection.answers([(AskPiece(piece), 1 << 22)]))
        # And what is no question at all.
        connection._connected().send(b"junk")
        with pytest.raises(ModelError, match="does not send it"):
            connection._answer(1 << 22)
    finally:
        connection.close()
        context.term()
        sender.close()


@contextmanager
def hostile(answers: Sequence[list[bytes]]) -> Iterator[str]:
    """The address of somebody with the key who answers the first questions with these messages."""
    context = zmq.Context()
    gate = Gate(context)
    door = open_door(HERE, 0, "for a test")
    router = context.socket(zmq.ROUTER)
    gate.guard(router, WEIGHTS, SECRET)
    door.hand_to(router)

    def serve() -> None:
        with suppress(zmq.ContextTerminated):
            for answer in answers:
                peer, *_ = router.recv_multipart()
                for message in answer:
                    router.send_multipart([peer, message])
            while True:
                router.recv_multipart()
        router.close(0)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield door.address
    finally:
        context.term()
        door.shut()


def answer(data: bytes, **changes: Any) -> list[bytes]:
    head = Answer(nbytes=len(data), digest=piece_digest(data), refusal="")
    return [send_weights.encode(msgspec.structs.replace(head, **changes)), data]


def offer(
    *pieces: Piece, name: str = "m.gguf", nbytes: int = 100, identity: str = "0" * 32
) -> list[bytes]:
    wanted = StageFiles("gguf", "m.gguf", (FileSize(name, nbytes),), pieces)
    return answer(send_weights.encode(Offer(identity, wanted)))


WHOLE = Piece("m.gguf", 0, 100)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[b"junk"]], "sent what is no answer"),
        ([answer(b"junk")], "offers what is no model"),
        ([answer(b"", refusal="no\nwish")], "does not send it"),
        ([answer(b"", nbytes=1 << 40)], "sent 1099511627776 bytes, where there are"),
        ([answer(b"", nbytes=-1)], "sent 0 bytes, where there are"),
        ([offer(WHOLE, identity="../../somewhere")], "offers a model '../../somewhere'"),
        ([offer(WHOLE, identity="0" * 31 + "/")], "offers a model"),
        ([offer(Piece("m.gguf", 0, 1 << 23), nbytes=1 << 23)], "a piece of more than"),
        ([offer(Piece("m.gguf", 0, -1))], "a piece of more than"),
        ([offer(Piece("m.gguf", 90, 20))], "no such bytes"),
        ([offer(Piece("../m.gguf", 0, 20), name="../m.gguf")], "which is no model file"),
        ([offer(Piece("/m.gguf", 0, 20), name="/m.gguf")], "which is no model file"),
        ([offer(Piece("./.received", 0, 20), name="./.received")], "which is no model file"),
        ([offer(Piece("", 0, 20), name="")], "cannot be written"),
        ([offer(WHOLE, nbytes=-5)], "cannot be written|no such bytes"),
        ([offer(WHOLE), answer(bytes(101))], "sent 101 bytes, where there are 100 at most"),
        ([offer(WHOLE), answer(bytes(100), nbytes=40)], "sent 100 bytes"),
        ([offer(WHOLE), answer(bytes(99))], "came damaged"),
        ([offer(WHOLE), answer(bytes(100), digest="0" * 32)], "came damaged"),
    ],
)
def test_a_hostile_sender_makes_an_error_and_nothing_outside_the_folder(
    program: Program, tmp_path: Path, answers: list[list[bytes]], message: str
) -> None:
    folder = tmp_path / "cache" / "weights"
    with hostile(answers) as address, pytest.raises(ModelError, match=message):
        receive(address, program, folder)
    there = {path.relative_to(tmp_path).parts for path in tmp_path.rglob("*")}
    assert all(parts[:2] == ("cache", "weights")[: len(parts)] for parts in there)
    assert all(len(parts) < 3 or parts[2] == "0" * 32 for parts in there)


def test_a_damaged_piece_is_asked_for_anew_at_the_next_try(
    sender: WeightsSender, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def damaged(files: ModelFiles, piece: Piece) -> bytes:
        nonlocal count
        count += 1
        return read_piece(files, piece)

    def digest(data: bytes) -> str:
        # The third piece's, or the fourth's.
        return "0" * 32 if count == 3 else piece_digest(data)

    address = sender.address()
    monkeypatch.setattr(weights_sender, "read_piece", damaged)
    monkeypatch.setattr(weights_sender, "piece_digest", digest)
    with pytest.raises(ModelError, match="came damaged"):
        receive(address, program, tmp_path)
    received = receive(address, program, tmp_path)
    assert 0 < received.there < received.came


def test_one_at_a_time_receives_into_a_folder_and_the_other_has_it_all(
    sender: WeightsSender, program: Program, tmp_path: Path, pieces_read: list[Piece]
) -> None:
    address, results = sender.address(), list[Received]()
    held, waits = threading.Event(), threading.Event()

    def first_progress(done: float) -> None:
        held.set()
        assert waits.wait(60)

    def first() -> None:
        results.append(receive(address, program, tmp_path, on_progress=first_progress))

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(60)
    second = receive(address, program, tmp_path, on_progress=lambda _: waits.set())
    thread.join()
    assert second.came == 0
    assert results[0].came == sum(piece.nbytes for piece in pieces_read)


def test_a_folder_that_others_may_enter_is_not_used(
    sender: WeightsSender, program: Program, tmp_path: Path
) -> None:
    receive(sender.address(), program, tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o755)
    with pytest.raises(ModelError, match="others may enter it"):
        receive(sender.address(), program, tmp_path)


def test_many_ask_at_once_and_each_has_what_it_asked_for(
    sender: WeightsSender, files: ModelFiles, tmp_path: Path
) -> None:
    model, address = read_model(files), sender.address()
    shares = (StageShare(n, n + 1, embeds=False, samples=False) for n in range(3))
    programs = [model.program(share) for share in shares]
    done: list[Received] = []

    def one(number: int) -> None:
        done.append(receive(address, programs[number], tmp_path / str(number)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    for number, program in enumerate(programs):
        assert receive(address, program, tmp_path / str(number)).came == 0


def test_one_who_asks_and_does_not_read_holds_nobody_up(
    sender: WeightsSender, files: ModelFiles, program: Program, tmp_path: Path
) -> None:
    pieces = stage_files(files, whole(read_model(files))).pieces
    largest = sorted(pieces, key=lambda piece: piece.nbytes)[-8:]
    context = zmq.Context()
    idle = weights_receiver._Connection(context, Source(sender.address(), SECRET), lambda: None)
    try:
        for piece in largest:
            idle._ask(AskPiece(piece))
        assert receive(sender.address(), program, tmp_path).came > 0
    finally:
        idle.close()
        context.term()
