"""Files that run code where an ordinary reader loads them: every reader of Shoal refuses them.

A canary file tells whether any of it ran. More ways to hide code in a checkpoint are in
``tests/checkpoint/test_hostile_pickles.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shoal.core.errors import ShoalError

pytest.importorskip("torch")


class Touch:
    """Unpickled by an ordinary reader, this makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.command = f"touch {canary}"

    def __reduce__(self) -> Any:
        return (os.system, (self.command,))


def npy(canary: Path) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([Touch(canary)], dtype=object), allow_pickle=True)
    return out.getvalue()


def joblib(canary: Path) -> bytes:
    out = io.BytesIO()
    pytest.importorskip("joblib").dump({"weights": Touch(canary)}, out, compress=3)
    return out.getvalue()


def python_yaml(canary: Path) -> bytes:
    return f'!!python/object/apply:os.system ["touch {canary}"]\n'.encode()


PAYLOADS: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda canary: pickle.dumps({"weights": Touch(canary)}),
    "npy": npy,
    "joblib": joblib,
    "yaml": python_yaml,
}

ORDINARY: dict[str, Callable[[bytes], Any]] = {
    "pickle": pickle.loads,
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    "joblib": lambda data: pytest.importorskip("joblib").load(io.BytesIO(data)),
    "yaml": yaml.unsafe_load,
}

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip


def model(place: Path) -> Any:
    from shoal.model import huggingface

    (place / "config.json").write_text(json.dumps(LLAMA))
    return huggingface.read(place)


def checkpoint(place: Path) -> Any:
    from shoal.checkpoint.inspect import listing

    return listing(place)


def drafter(place: Path) -> Any:
    from shoal.model.drafters.files import read

    return read(place)


def tokenizer(place: Path) -> Any:
    from shoal.corpora.tokenizer import load

    return load(place / "tokenizer.json")


def header(place: Path) -> Any:
    from shoal.core.safetensors_header import read_header

    return read_header(place / "model.safetensors")


def gguf(place: Path) -> Any:
    from shoal.model.gguf_header import read_header

    return read_header(place / "model.gguf")


def settings(place: Path) -> Any:
    from shoal.core.files import read_yaml

    return read_yaml(place / "job.yaml")


def machine(place: Path) -> Any:
    from shoal.machine import described

    return described.load(place / "machine.yaml")


def log(place: Path) -> Any:
    from shoal.cost.imports.measure import read

    return read(place / "engine.log")


def result(place: Path) -> Any:
    from shoal.claims.record import read

    return read(place / "result.json")


def rows(place: Path) -> Any:
    from shoal.corpora.jsonl import JsonlCorpus

    return list(JsonlCorpus(path=str(place / "corpus.jsonl")).documents())


def table(place: Path) -> Any:
    from shoal.corpora.parquet import Parquet

    return list(Parquet(path=str(place / "corpus.parquet")).documents())


def words(place: Path) -> Any:
    from shoal.corpora.text import TextCorpus

    return list(TextCorpus(path=str(place / "corpus.txt")).documents())


# Reader -> the names under which it finds the file.
READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "model": (
        model,
        ("model.safetensors", "pytorch_model.bin", "model.npy", "model.joblib", "config.json"),
    ),
    "checkpoint": (
        checkpoint,
        ("pytorch_model.bin", "index.json", ".metadata", "model.safetensors", "weights.joblib"),
    ),
    "drafter": (drafter, ("drafter.json",)),
    "tokenizer": (tokenizer, ("tokenizer.json",)),
    "safetensors": (header, ("model.safetensors",)),
    "gguf": (gguf, ("model.gguf",)),
    "settings": (settings, ("job.yaml",)),
    "machine": (machine, ("machine.yaml",)),
    "log": (log, ("engine.log",)),
    "result": (result, ("result.json",)),
    "jsonl": (rows, ("corpus.jsonl",)),
    "parquet": (table, ("corpus.parquet",)),
    "text": (words, ("corpus.txt",)),
}
CASES = [(reader, name) for reader, (_, names) in READERS.items() for name in names]


@pytest.mark.parametrize("kind", PAYLOADS)
def test_the_canary_appears_where_an_ordinary_reader_loads_it(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    ORDINARY[kind](PAYLOADS[kind](canary))
    assert canary.exists()


@pytest.mark.parametrize("kind", PAYLOADS)
def test_every_reader_refuses_in_words_and_runs_nothing(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    canary = tmp_path / "canary"
    data = PAYLOADS[kind](canary)
    for reader, name in CASES:
        place = tmp_path / "place"
        place.mkdir()
        (place / name).write_bytes(data)
        if (reader, kind) == ("text", "yaml"):  # plain text, and read as such
            assert READERS[reader][0](place)[0].text == data.decode()
        else:
            with pytest.raises(ShoalError) as caught:
                READERS[reader][0](place)
            assert str(place) in str(caught.value), (reader, name)
        assert not canary.exists(), (reader, name)
        shutil.rmtree(place)
    record_property("figure", f"{len(CASES)} readers and names x {len(PAYLOADS)} kinds: 0 ran")


def bombs(place: Path) -> dict[str, Path]:
    """Files of 1 kB that claim 10^12 elements, entries or bytes."""
    huge = 10**12
    gguf_start = b"GGUF" + struct.pack("<I", 3)
    entry = {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * huge]}
    table = json.dumps({"w": entry}).encode()
    key = struct.pack("<Q", 1) + b"k"
    made = {
        "model.safetensors": struct.pack("<Q", len(table)) + table,
        "length.safetensors": struct.pack("<Q", huge),
        "tensors.gguf": gguf_start + struct.pack("<QQ", huge, 0),
        "keys.gguf": gguf_start + struct.pack("<QQ", 0, huge),
        "array.gguf": gguf_start + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, huge),
        "elements.gguf": gguf_start
        + struct.pack("<QQ", 1, 0)
        + key
        + struct.pack("<IQQIQ", 2, 10**6, 10**6, 0, 0),
    }
    for name, data in made.items():
        (place / name).write_bytes(data.ljust(1024, b"\0"))
    return {name: place / name for name in made}


def test_a_small_file_that_claims_much_takes_no_memory(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    from shoal.core.safetensors_header import read_header as read_safetensors
    from shoal.model.gguf_header import read_header as read_gguf

    most = 0
    files = bombs(tmp_path)
    for name, path in files.items():
        read = read_gguf if name.endswith("gguf") else read_safetensors
        tracemalloc.start()
        with pytest.raises(ShoalError) as caught:
            read(path)
        most = max(most, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert name in str(caught.value)
    assert most < 16 * 2**20
    record_property(
        "figure", f"{len(files)} files refused; at most {most / 1024:.0f} KiB allocated"
    )


# Files of a model directory in which transformers looks for code, and the key that names it.
CODE = {
    "config.json": {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}},
    "sub-model": {"text_config": {"auto_map": {"AutoModel": "evil.Evil"}}},
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
    "preprocessor_config.json": {"auto_map": {"AutoImageProcessor": "evil.Evil"}},
    "processor_config.json": {"auto_map": {"AutoProcessor": "evil.Evil"}},
    "generation_config.json": {"custom_generate": "evil.py"},
}


@pytest.mark.parametrize("where", CODE)
def test_no_code_of_a_model_directory_is_imported(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """By config, sub-model, tokenizer or processor; nor a file named like a standard module."""
    from shoal.checkpoint.inspect import listing
    from shoal.corpora.tokenizer import load, train
    from shoal.model import huggingface
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

    canary = tmp_path / "canary"
    place = tmp_path / "model"
    config = ModelConfig(
        vocab_size=257, hidden=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
        ffn_hidden=16, max_position=32,
    )  # fmt: skip
    huggingface.write(place, Transformer(config))
    train([""], 257).save(str(place / "tokenizer.json"))
    named = ["evil", "json", "tokenizers", "modeling_llama", "configuration_llama", "__init__"]
    for name in named:
        (place / f"{name}.py").write_text(f"open({str(canary)!r}, 'w').write('ran')\n")
    file = place / ("config.json" if where == "sub-model" else where)
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | CODE[where]))
    monkeypatch.chdir(place)
    for use in (huggingface.read, huggingface.read_config, load, listing, huggingface.find_weights):
        with contextlib.suppress(ShoalError):  # refused or passed over: both are fine
            use(place)
    assert not canary.exists()
    assert "evil" not in sys.modules
    record_property("figure", "0 of 6 planted modules imported")
