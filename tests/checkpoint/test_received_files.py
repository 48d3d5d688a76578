"""A stage loads from what was sent of a model, and nothing but its own was sent."""

import os
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.checkpoint.extents import tensor_extents
from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.checkpoint.received_files import ReceivedFiles
from headrace.checkpoint.stage_files import piece_digest, read_piece, stage_files
from headrace.checkpoint.tensor_check import tensors_of
from headrace.errors import ModelError
from headrace.kernels.linear import Linear
from headrace.model.bind import Weights
from headrace.protocol.model_config import StageShare
from headrace.protocol.stage_files import FileSize, Piece, StageFiles
from stage_models import load_stage, read_model
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama

LAST = StageShare(2, 4, embeds=False, samples=True)


@pytest.fixture(params=["directory", "shards", "gguf"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> ModelFiles:
    match request.param:
        case "directory":
            return ModelFiles(write_tiny_llama(tmp_path / "sent"), "huggingface")
        case "shards":
            path = write_tiny_llama(tmp_path / "sent", max_shard_size="20KB")
            return ModelFiles(path, "huggingface")
    (tmp_path / "sent").mkdir()
    return ModelFiles(write_tiny_gguf(tmp_path / "sent" / "model.gguf"), "gguf")


def send(files: ModelFiles, wanted: StageFiles, received: ReceivedFiles) -> None:
    for number in list(received.missing):
        data = read_piece(files, wanted.pieces[number])
        # As it would travel.
        received.put(number, bytes(data), piece_digest(data))


def tensors(weights: Weights) -> list[torch.Tensor]:
    found = [t for t in weights.tables.values() if isinstance(t, torch.Tensor)]
    found += weights.vectors.values()
    return found + [m._weight for m in weights.matrices.values() if isinstance(m, Linear)]


def assert_loads_the_same(files: ModelFiles, other: ModelFiles, share: StageShare) -> None:
    model = read_model(files)
    ours, theirs = (load_stage(each, model, share, max_model_len=64) for each in (files, other))
    assert len(tensors(ours.weights)) >= 6
    for a, b in zip(tensors(ours.weights), tensors(theirs.weights), strict=True):
        assert torch.equal(a, b)


def test_a_stage_loads_from_what_was_received(files: ModelFiles, tmp_path: Path) -> None:
    wanted = stage_files(files, read_model(files).program(LAST))
    # As it would travel.
    wanted = msgspec.msgpack.decode(msgspec.msgpack.encode(wanted), type=StageFiles)
    received = ReceivedFiles(tmp_path / "received", wanted)
    assert received.missing == list(range(len(wanted.pieces)))
    send(files, wanted, received)
    assert received.missing == []
    assert received.missing_bytes == 0
    assert_loads_the_same(files, received.files, LAST)


def test_no_other_stages_tensors_are_sent(files: ModelFiles, tmp_path: Path) -> None:
    program = read_model(files).program(LAST)
    wanted = stage_files(files, program)
    received = ReceivedFiles(tmp_path / "received", wanted)
    send(files, wanted, received)
    own = {tensor.name for tensor in tensors_of(program)}
    sent, there = tensor_extents(files), tensor_extents(received.files)
    assert sent.keys() == there.keys()
    assert own & sent.keys() < sent.keys()
    for name, extent in there.items():
        with extent.file.open("rb") as file:
            content = os.pread(file.fileno(), extent.nbytes, extent.offset)
        with sent[name].file.open("rb") as file:
            original = os.pread(file.fileno(), extent.nbytes, extent.offset)
        assert content == (original if name in own else bytes(extent.nbytes)), name


def test_what_was_not_sent_takes_no_room_on_the_disk(tmp_path: Path) -> None:
    files = locate_model("smollm2")
    share = StageShare(20, 21, embeds=False, samples=False)
    wanted = stage_files(files, read_model(files).program(share))
    received = ReceivedFiles(tmp_path / "received", wanted)
    send(files, wanted, received)
    status = received.files.path.stat()
    assert status.st_size == files.path.stat().st_size
    assert status.st_blocks * 512 < status.st_size / 4
    assert_loads_the_same(files, received.files, share)


def test_large_tensors_are_cut_into_pieces_of_a_message() -> None:
    files = locate_model("smollm2")
    program = read_model(files).program(StageShare(0, 1, embeds=True, samples=False))
    pieces = stage_files(files, program).pieces
    assert max(piece.nbytes for piece in pieces) == 1 << 22
    ends = [(piece.offset, piece.offset + piece.nbytes) for piece in pieces]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_an_interrupted_transfer_goes_on_where_it_was(files: ModelFiles, tmp_path: Path) -> None:
    wanted = stage_files(files, read_model(files).program(LAST))
    first = ReceivedFiles(tmp_path / "received", wanted)
    half = first.missing[: len(first.missing) // 2]
    for number in half:
        data = read_piece(files, wanted.pieces[number])
        first.put(number, data, piece_digest(data))
    # It was cut off while it wrote a line.
    with (tmp_path / "received" / ".received").open("ab") as journal:
        journal.write(b'[["model.safet')
    second = ReceivedFiles(tmp_path / "received", wanted)
    assert second.missing == list(range(len(half), len(wanted.pieces)))
    assert second.missing_bytes == sum(piece.nbytes for piece in wanted.pieces[len(half) :])
    send(files, wanted, second)
    assert_loads_the_same(files, second.files, LAST)


def test_a_stage_with_more_layers_receives_only_those(files: ModelFiles, tmp_path: Path) -> None:
    model = read_model(files)
    small = stage_files(files, model.program(LAST))
    send(files, small, ReceivedFiles(tmp_path / "received", small))
    share = StageShare(1, 4, embeds=False, samples=True)
    large = stage_files(files, model.program(share))
    received = ReceivedFiles(tmp_path / "received", large)
    assert {large.pieces[number] for number in received.missing} == {*large.pieces} - {
        *small.pieces
    }
    assert 0 < len(received.missing) < len(large.pieces) - 9
    send(files, large, received)
    assert_loads_the_same(files, received.files, share)
    # The folder serves the stage that it served before, too.
    assert ReceivedFiles(tmp_path / "received", small).missing == []


def test_a_piece_that_the_disk_lost_is_missing_again(files: ModelFiles, tmp_path: Path) -> None:
    wanted = stage_files(files, read_model(files).program(LAST))
    send(files, wanted, ReceivedFiles(tmp_path / "received", wanted))
    lost = wanted.pieces[-1]
    with (tmp_path / "received" / lost.file).open("r+b") as file:
        file.seek(lost.offset)
        file.write(bytes(lost.nbytes))
    assert ReceivedFiles(tmp_path / "received", wanted).missing == [len(wanted.pieces) - 1]


def test_a_damaged_piece_is_refused(files: ModelFiles, tmp_path: Path) -> None:
    wanted = stage_files(files, read_model(files).program(LAST))
    received = ReceivedFiles(tmp_path / "received", wanted)
    data = read_piece(files, wanted.pieces[0])
    for damaged in (data[:-1], bytes([data[0] ^ 1]) + data[1:]):
        with pytest.raises(ModelError, match="bytes at 0 came damaged"):
            received.put(0, damaged, piece_digest(data))
    received.put(0, data, piece_digest(data))
    for number in (0, -1, len(wanted.pieces)):
        with pytest.raises(ModelError, match="none of those that are missing"):
            received.put(number, data, piece_digest(data))


@pytest.mark.parametrize(
    ("name", "piece", "message"),
    [
        ("../model.gguf", None, "no model file"),
        ("/etc/model.gguf", None, "no model file"),
        ("a/../../b", None, "no model file"),
        (".received", None, "no model file"),
        ("model.gguf", Piece("model.gguf", 90, 20), "no such bytes"),
        ("model.gguf", Piece("model.gguf", -1, 2), "no such bytes"),
        ("model.gguf", Piece("model.gguf", 5, -2), "no such bytes"),
        ("model.gguf", Piece("other.gguf", 0, 1), "no such bytes"),
    ],
)
def test_nothing_is_written_outside_the_models_files(
    tmp_path: Path, name: str, piece: Piece | None, message: str
) -> None:
    wanted = StageFiles("gguf", "model.gguf", (FileSize(name, 100),), (piece,) if piece else ())
    with pytest.raises(ModelError, match=message):
        ReceivedFiles(tmp_path / "received", wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    wanted = StageFiles(
        "gguf", "m.gguf", (FileSize("m.gguf", 1 << 40),), (Piece("m.gguf", 0, 1 << 40),) * 2**8
    )
    with pytest.raises(ModelError, match="are to come, and the disk has"):
        ReceivedFiles(tmp_path / "received", wanted)


def test_a_share_of_another_model_is_refused_by_its_first_tensor(
    files: ModelFiles, tmp_path: Path
) -> None:
    larger = ModelFiles(write_tiny_llama(tmp_path / "larger", num_hidden_layers=5), "huggingface")
    program = read_model(larger).program(StageShare(4, 5, embeds=False, samples=False))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.4\..* is missing"):
        stage_files(files, program)
