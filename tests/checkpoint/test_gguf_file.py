"""A GGUF file is read as gguf's own writer and codecs mean it, or refused in one clear line."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.gguf_file import SUPPORTED_KINDS, GgufFile, read_gguf
from headrace.errors import ModelError

ROWS, COLUMNS = 3, 512
# Where each block of a K-quant keeps its float16 scales; random bits there could be NaN.
HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
METADATA: list[tuple[str, Any, Value, Value | None]] = [
    ("a.u8", 255, Value.UINT8, None),
    ("a.i8", -128, Value.INT8, None),
    ("a.u16", 65535, Value.UINT16, None),
    ("a.i16", -32768, Value.INT16, None),
    ("a.u32", 2**32 - 1, Value.UINT32, None),
    ("a.i32", -(2**31), Value.INT32, None),
    ("a.u64", 2**64 - 1, Value.UINT64, None),
    ("a.i64", -(2**63), Value.INT64, None),
    ("a.f32", 0.5, Value.FLOAT32, None),
    ("a.f64", 0.1, Value.FLOAT64, None),
    ("a.yes", True, Value.BOOL, None),
    ("a.text", "línea\n▁", Value.STRING, None),
    ("a.empty", "", Value.STRING, None),
    ("a.texts", ["", "a", "日本"], Value.ARRAY, Value.STRING),
    ("a.ints", [1, -2, 3], Value.ARRAY, Value.INT32),
    ("a.floats", [0.5, -0.25], Value.ARRAY, Value.FLOAT32),
    ("a.flags", [True, False], Value.ARRAY, Value.BOOL),
    ("a.nested", [[1, 2], [3]], Value.ARRAY, Value.ARRAY),
]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], metadata: bool = True) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if metadata:
        for key, value, form, element in METADATA:
            writer.add_key_value(key, value, form, None if element == Value.ARRAY else element)
    for name, (stored, kind) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensor(kind: Kind) -> np.ndarray:
    """A matrix of `ROWS` x `COLUMNS` in the stored form of `kind`."""
    random = np.random.default_rng(int(kind))
    if kind not in HALVES:
        values = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
        return np.asarray(gguf.quants.quantize(values, kind))
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (ROWS, COLUMNS // block, block_bytes), np.uint8)
    for at in HALVES[kind]:
        scales = random.uniform(-2, 2, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


def small_file(path: Path) -> Path:
    tensors = {
        "norm": (np.arange(8, dtype=np.float32), Kind.F32),
        "weight": (stored_tensor(Kind.Q4_0), Kind.Q4_0),
    }
    return write(path, tensors)


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def header(
    metadata: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3
) -> bytes:
    tensor_count, metadata_count = counts
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, metadata_count) + metadata + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def described(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize("kind", SUPPORTED_KINDS, ids=lambda kind: kind.name)
def test_every_supported_kind_loads_as_gguf_dequantizes_it(tmp_path: Path, kind: Kind) -> None:
    stored = stored_tensor(kind)
    file = read_gguf(write(tmp_path / "model.gguf", {"w": (stored, kind)}))
    loaded = file.load("w")
    assert file.tensors["w"].shape == loaded.shape == (ROWS, COLUMNS)
    assert file.tensors["w"].kind == kind
    assert file.tensors["w"].nbytes == stored.nbytes
    assert loaded.dtype == np.float32
    assert np.isfinite(loaded).all()
    np.testing.assert_array_equal(loaded, gguf.quants.dequantize(stored, kind))


def test_shapes_are_rows_first_and_keep_every_dimension(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4 * 32, dtype=np.float32).reshape(2, 3, 4, 32)
    quantized = gguf.quants.quantize(values, Kind.Q8_0)
    file = read_gguf(
        write(
            tmp_path / "model.gguf",
            {"four": (values, Kind.F32), "blocks": (quantized, Kind.Q8_0)},
        )
    )
    np.testing.assert_array_equal(file.load("four"), values)
    assert file.load("blocks").shape == values.shape


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0], ids=lambda k: k.name)
def test_a_loaded_tensor_is_writable_and_apart_from_the_file(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "model.gguf", {"w": (stored_tensor(kind), kind)})
    before = path.read_bytes()
    file = read_gguf(path)
    first = file.load("w")
    kept = first.copy()
    first[:] = 7
    np.testing.assert_array_equal(file.load("w"), kept)
    assert path.read_bytes() == before


def test_metadata_of_every_type_come_back_as_written(tmp_path: Path) -> None:
    file = read_gguf(small_file(tmp_path / "model.gguf"))
    expected = {key: value for key, value, _, _ in METADATA}
    assert file.metadata == {"general.architecture": "llama"} | expected
    assert file.metadata["a.yes"] is True
    assert isinstance(file.metadata["a.u8"], int)


@pytest.mark.parametrize("element", [Value.UINT8, Value.STRING, Value.ARRAY])
def test_empty_arrays_are_read_even_at_the_end(tmp_path: Path, element: Value) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(text(b"k") + struct.pack("<IIQ", 9, element, 0), counts=(0, 1)))
    assert read_gguf(path).metadata == {"k": []}


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    alignment = text(b"general.alignment") + struct.pack("<II", Value.UINT32, 128)
    tensors = described(b"w", (2, 2), Kind.F32, 128)
    head = header(alignment, tensors, counts=(1, 1), version=2)
    data = np.arange(4, dtype=np.float32)
    path.write_bytes(head + bytes(-len(head) % 128) + bytes(128) + data.tobytes())
    np.testing.assert_array_equal(read_gguf(path).load("w"), data.reshape(2, 2))


def test_an_unknown_tensor_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tensor 'absent'"):
        read_gguf(small_file(tmp_path / "model.gguf")).load("absent")


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"", "is not a GGUF file: it has only 0 bytes"),
        (b"GG", "is not a GGUF file: it has only 2 bytes"),
        (b"PK\3\4 something else", "is not a GGUF file: it starts with b'PK\\x03\\x04'"),
        (header(version=1), "is GGUF version 1, but only versions 2 and 3 can be read"),
        (header(version=4), "is GGUF version 4, but only versions 2 and 3 can be read"),
        (header(version=3 << 24), "is a big-endian GGUF file"),
        (header()[:20], "the header is truncated or damaged: the metadata count"),
        (header(counts=(2**60, 0)), "the header is truncated or damaged: a header of 1152921504"),
        (header(counts=(0, 2**60)), "the header is truncated or damaged: a header of 0 tensors"),
        (
            header(struct.pack("<Q", 2**62) + bytes(8), counts=(0, 1)),
            "the header is truncated or damaged: a metadata key needs 4611686018427387904 bytes",
        ),
        (
            header(text(b"k") + struct.pack("<I", 13), counts=(0, 1)),
            "'k' has the unknown value type 13",
        ),
        (
            header((text(b"k") + struct.pack("<IB", Value.UINT8, 1)) * 2, counts=(0, 2)),
            "metadata key 'k' appears twice",
        ),
        (
            header(text(b"\xff") + struct.pack("<IB", Value.UINT8, 1), counts=(0, 1)),
            "a metadata key at offset 32 is not UTF-8",
        ),
        (
            header(text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, counts=(0, 1)),
            "'k' nests arrays deeper than 4",
        ),
        (
            header(text(b"k") + struct.pack("<IIQ", 9, 4, 2**40), counts=(0, 1)),
            "the header is damaged: 'k' has 1099511627776 elements",
        ),
        (
            header(text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**40), counts=(0, 1)),
            "the header is truncated or damaged: an element of 'k' needs 1099511627776 bytes",
        ),
        (
            header(
                text(b"general.alignment") + struct.pack("<II", Value.UINT32, 48), counts=(0, 1)
            ),
            "general.alignment is 48, but it must be a power of two",
        ),
        (
            header(text(b"general.alignment") + struct.pack("<II", Value.UINT32, 0), counts=(0, 1)),
            "general.alignment is 0, but it must be a power of two",
        ),
        (
            header(tensors=described(b"w", (4,), Kind.F32, 0) * 2, counts=(2, 0)) + bytes(64),
            "tensor 'w' appears twice",
        ),
        (
            header(tensors=described(b"w", (4,), Kind.F32, 4), counts=(1, 0)) + bytes(64),
            "tensor 'w' starts at offset 4, which is not a multiple of the alignment, 32",
        ),
        (
            header(tensors=described(b"w", (256,), Kind.Q2_K, 0), counts=(1, 0)) + bytes(99),
            "tensor 'w' is of kind Q2_K, which is not supported; convert the model to one of F32,",
        ),
        (
            header(tensors=described(b"w", (256,), 999, 0), counts=(1, 0)) + bytes(99),
            "tensor 'w' is of kind 999, which is not supported",
        ),
        (
            header(tensors=described(b"w", (1,) * 5, Kind.F32, 0), counts=(1, 0)) + bytes(99),
            "tensor 'w' has 5 dimensions, but 1 to 4 are possible",
        ),
        (
            header(tensors=described(b"w", (33, 2), Kind.Q4_0, 0), counts=(1, 0)) + bytes(99),
            "tensor 'w' of kind Q4_0 has shape (2, 33), but its rows must be whole blocks of 32",
        ),
        (
            header(tensors=described(b"w", (0, 4), Kind.F32, 0), counts=(1, 0)) + bytes(99),
            "tensor 'w' of kind F32 has shape (4, 0)",
        ),
        (
            header(tensors=described(b"w", (2**62, 2**62), Kind.F32, 0), counts=(1, 0)),
            "is truncated: tensor 'w' needs 85070591730234615865843651857942052864 bytes",
        ),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, contents: bytes, expected: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    assert refusal(path).startswith(expected)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf").startswith("cannot be opened: No such file")
    assert refusal(tmp_path).startswith("cannot be opened: Is a directory")


def test_missing_tensor_data_are_counted_at_open(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf")
    last = read_gguf(path).tensors["weight"]
    path.write_bytes(path.read_bytes()[: last.offset + last.nbytes - 5])
    assert refusal(path).startswith(
        f"is truncated: tensor 'weight' needs {last.nbytes} bytes at offset {last.offset}, "
        "but 5 bytes are missing"
    )


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(struct.pack("<Q", 1 << 30), id="key"),
        pytest.param(text(b"k") + struct.pack("<IQ", Value.STRING, 1 << 30), id="text"),
        pytest.param(text(b"k") + struct.pack("<IIQ", 9, Value.UINT8, 1 << 30), id="numbers"),
        pytest.param(text(b"k") + struct.pack("<IIQ", 9, Value.STRING, 1 << 26), id="texts"),
        pytest.param(text(b"k") + struct.pack("<IIQQ", 9, 8, 9, 1 << 30), id="text in array"),
    ],
)
def test_lengths_that_a_large_file_could_hold_are_still_refused_without_reading_them(
    tmp_path: Path, metadata: bytes
) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as handle:
        handle.write(header(metadata, counts=(0, 1)))
        handle.truncate(1 << 31)  # a hole: no disk is used
    tracemalloc.start()
    try:
        assert "the header is damaged" in refusal(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def read_or_refuse(path: Path) -> GgufFile | None:
    try:
        file = read_gguf(path)
    except ModelError:
        return None
    for name, tensor in file.tensors.items():
        assert file.load(name).shape == tensor.shape
    return file


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    tensors = read_gguf(tmp_path / "whole.gguf").tensors.values()
    end = max(tensor.offset + tensor.nbytes for tensor in tensors)
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(whole[:length])
        assert read_or_refuse(path) is None, f"cut to {length} of {end} bytes"


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_header_with_a_changed_byte_is_read_or_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    source = tmp_path / "whole.gguf"
    if not source.exists():
        small_file(source)
    whole = bytearray(source.read_bytes())
    first = min(tensor.offset for tensor in read_gguf(source).tensors.values())
    position = data.draw(st.integers(0, first - 1), label="position")
    whole[position] ^= data.draw(st.integers(1, 255), label="flipped bits")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    with np.errstate(all="ignore"):
        read_or_refuse(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rest=st.binary(max_size=200), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_random_bytes_after_a_plausible_start_are_read_or_refused(
    tmp_path: Path, rest: bytes, counts: tuple[int, int]
) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(header(rest, counts=counts))
    read_or_refuse(path)
