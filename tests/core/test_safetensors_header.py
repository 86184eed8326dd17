"""Headers: equal to the reference implementation's, and hostile ones refused cheaply."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import CheckpointError, ModelError
from shoal.core.safetensors_header import ITEM_BYTES, encode_header, read_header


def write(path: Path, table: Any, payload: bytes = b"", length: int | None = None) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {n: t.shape for n, t in header.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    raw = path.read_bytes()
    for name, tensor in tensors.items():
        place = header.tensors[name]
        flat = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw[place.start : place.stop] == flat
        assert place.num_bytes == len(flat)
    assert raw[: header.num_bytes] == header.raw


def test_the_reference_reads_what_is_written(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header({"ä\ud83d\ude00": ("I64", (2,)), "b": ("U8", (3,))}) + bytes(19))
    assert sorted(tuple(a.shape) for a in load_file(str(path)).values()) == [(2,), (3,)]


HOSTILE: dict[str, tuple[Any, bytes]] = {
    "a trillion elements": ({"w": entry([10**12], 0, 4 * 10**12)}, b""),
    "a trillion elements in few bytes": ({"w": entry([10**6, 10**6], 0, 64)}, bytes(64)),
    "a product that wraps around 2^64": ({"w": entry([2**33, 2**33], 0, 0)}, b""),
    "a count beyond any memory": ({"w": entry([2**64], 0, 0)}, b""),
    "a negative size": ({"w": entry([-1], 0, 4)}, bytes(4)),
    "true as a size": ({"w": entry([True], 0, 4)}, bytes(4)),
    "a float as a size": ({"w": entry([1.0], 0, 4)}, bytes(4)),
    "offsets backwards": ({"w": entry([1], 4, 0)}, bytes(4)),
    "offsets beyond the file": ({"w": entry([1], 4, 8)}, bytes(4)),
    "three offsets": ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, bytes(4)),
    "two tensors in one place": ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)),
    "a hole": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "bytes that belong to nobody": ({"a": entry([1], 0, 4)}, bytes(5)),
    "an unknown dtype": ({"w": entry([1], 0, 4, dtype="PICKLE")}, bytes(4)),
    "a dtype that is a list": ({"w": entry([1], 0, 4, dtype=["F32"])}, bytes(4)),
    "a key too few": ({"w": {"dtype": "F32"}}, bytes(4)),
    "a tensor that is a number": ({"w": 3}, b""),
    "too many dimensions": ({"w": entry([1] * 65, 0, 4)}, bytes(4)),
    "metadata that is no text": ({"__metadata__": {"a": 1}}, b""),
    "a list": ([1], b""),
    "no JSON": (b"{'w'", b""),
    "no text": (b"\xff\xfe{}", b""),
    "the same name twice": (b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":1}', b"1"),
    "deep nesting": (b"[" * 100_000, b""),
    "a number of a million digits": (b'{"w":' + b"9" * 1_000_000 + b"}", b""),
    "NaN": (b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", *HOSTILE[case])
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"x\.safetensors"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize("length", [2**63, 10**12, 1025, 100_000_001])
def test_a_length_beyond_the_file_is_refused_before_allocating(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b" " * 1016, length=length)
    tracemalloc.start()
    with pytest.raises(ModelError, match=f"claims {length} bytes"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("size", [0, 7])
def test_a_cut_file_is_refused_in_the_callers_words(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match="too few"):
        read_header(path, error=CheckpointError)
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "absent")


def test_item_sizes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from shoal.checkpoint.pieces import TORCH_NAMES

    for ours, theirs in TORCH_NAMES.items():
        assert ITEM_BYTES[ours] == getattr(torch, theirs).itemsize
