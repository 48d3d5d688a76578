"""Weights have one digest wherever and however they lie, and others have another."""

import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.checkpoint.digest import first_difference, weights_digest
from headrace.checkpoint.extents import tensor_extents
from headrace.checkpoint.locate import ModelFiles, locate_model
from headrace.errors import ModelError
from headrace.model.weights import open_tensors
from headrace.protocol.hosts import WeightsDigest
from headrace.protocol.stored_tensor import StoredTensor
from tiny_checkpoints import write_tiny_gguf, write_tiny_llama


def of_directory(path: Path) -> WeightsDigest:
    return weights_digest(ModelFiles(path, "huggingface"))


def of_gguf(path: Path) -> WeightsDigest:
    return weights_digest(ModelFiles(path, "gguf"))


def flip(files: ModelFiles, tensor: str, at: int = 0) -> None:
    """Change a byte of a tensor."""
    extent = tensor_extents(files)[tensor]
    with extent.file.open("r+b") as file:
        file.seek(extent.offset + at)
        (old,) = file.read(1)
        file.seek(extent.offset + at)
        file.write(bytes([old ^ 1]))


def test_extents_are_where_the_tensors_are(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny", max_shard_size="20KB")
    files = ModelFiles(path, "huggingface")
    extents = tensor_extents(files)
    assert len({extent.file for extent in extents.values()}) > 1
    source = open_tensors(files)
    for name, extent in extents.items():
        with extent.file.open("rb") as file:
            file.seek(extent.offset)
            stored = np.frombuffer(file.read(extent.nbytes), np.float32).reshape(extent.shape)
        loaded = source.load(StoredTensor(name, extent.shape))
        assert torch.equal(loaded, torch.from_numpy(stored.copy()))


def test_a_copy_and_other_shards_have_the_same_digest(tmp_path: Path) -> None:
    whole = write_tiny_llama(tmp_path / "whole")
    shards = write_tiny_llama(tmp_path / "shards", max_shard_size="20KB")
    copied = Path(shutil.copytree(whole, tmp_path / "elsewhere" / "copy"))
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert of_directory(whole) == of_directory(copied) == of_directory(shards)
    file = write_tiny_gguf(tmp_path / "a.gguf")
    assert of_gguf(file) == of_gguf(Path(shutil.copy(file, tmp_path / "b.gguf")))


def test_a_changed_tensor_is_found_by_its_name(tmp_path: Path) -> None:
    changed = "model.layers.2.mlp.up_proj.weight"
    path = write_tiny_llama(tmp_path / "tiny")
    before = of_directory(path)
    flip(ModelFiles(path, "huggingface"), changed)
    after = of_directory(path)
    assert before.total != after.total
    assert first_difference(before, after) == changed
    assert first_difference(before, before) is None


@pytest.mark.parametrize("at", [0, 2 * 64 * 1024, 4 * 64 * 1024 - 1])
def test_of_a_large_tensor_beginning_middle_and_end_count(tmp_path: Path, at: int) -> None:
    file = tmp_path / "large.gguf"
    write_one_tensor(file, np.zeros((64, 1024), np.float32))
    before = of_gguf(file)
    flip(ModelFiles(file, "gguf"), "a", at)
    assert first_difference(before, of_gguf(file)) == "a"


def test_names_shapes_and_types_count(tmp_path: Path) -> None:
    ones = np.ones((4, 64), np.float32)
    kinds: dict[str, tuple[str, np.ndarray]] = {
        "base": ("a", ones),
        "name": ("b", ones),
        "shape": ("a", ones.reshape(2, 128)),
        "type": ("a", np.frombuffer(ones.tobytes(), np.float16).reshape(4, 128)),
    }
    digests = []
    for kind, (name, values) in kinds.items():
        write_one_tensor(tmp_path / f"{kind}.gguf", values, name)
        digests.append(of_gguf(tmp_path / f"{kind}.gguf").total)
    assert len(set(digests)) == len(kinds)


def test_a_digest_reads_few_bytes_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    digest = weights_digest(locate_model("smollm2"))
    assert len(digest.tensors) == 272
    assert max(read) <= 3 * 4096
    assert sum(read) <= 272 * 3 * 4096


def test_synthetic_models_are_told_apart_by_their_time() -> None:
    totals = {weights_digest(locate_model(f"synthetic:{time}")).total for time in ("1+0", "2+0")}
    assert len(totals) == 2


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny")
    os.truncate(path / "model.safetensors", 5000)
    with pytest.raises(ModelError, match="damaged or cut short"):
        of_directory(path)


def write_one_tensor(path: Path, values: np.ndarray, name: str = "a") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
