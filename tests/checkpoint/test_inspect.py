"""Listing, verifying and converting checkpoints and model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.convert import convert, load_model
from shoal.checkpoint.inspect import find, listing, verify
from shoal.checkpoint.store import MODEL, OPTIMIZER, Piece, Store
from shoal.core.errors import CheckpointError, ConfigError, CorruptError, ModelError
from shoal.model.config import ModelConfig

CONFIG = ModelConfig(
    name="tiny",
    vocab_size=32,
    hidden=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_hidden=24,
    tied=True,
)
META = {"model": CONFIG.model_dump(mode="json"), "seed": 3}


def model(seed: int = 0) -> Any:
    from shoal.model.transformer import Transformer

    torch.manual_seed(seed)
    made = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.2)
    return made


def state(of: Any) -> dict[str, torch.Tensor]:
    weights = {MODEL + name: p.detach() for name, p in of.named_parameters()}
    return {**weights, OPTIMIZER + "step": torch.tensor(9)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two steps."""
    store = Store(tmp_path / "run" / "checkpoints")
    store.save(5, state(model(0)), META)
    store.save(10, state(model(1)), META)
    return tmp_path / "run"


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def same(a: Any, b: Any) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def shards(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A Hugging Face directory in two shards."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    held = {
        "model-00001-of-00002.safetensors": {"a": torch.ones(3, 2), "b": torch.ones(4)},
        "model-00002-of-00002.safetensors": {"c": torch.ones(5).bfloat16()},
    }
    path.mkdir()
    (path / "config.json").write_text("{}")
    for file, tensors in held.items():
        save_file(tensors, str(path / file))
    names = {name: file for file, tensors in held.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return held


def test_every_kind_is_recognised(run: Path) -> None:
    step = run / "checkpoints" / "step-00000010"
    (run / "tokenizer.json").write_text("{}")
    assert find(run).kind == find(run / "checkpoints").kind == "run"
    assert find(run).steps == (5, 10) and find(run).path == run / "checkpoints"
    assert find(step).kind == "checkpoint"
    for path in (run, run / "checkpoints", step):
        assert find(path).tokenizer == run / "tokenizer.json"


def test_listing_is_what_was_saved(run: Path) -> None:
    expected = {
        name: (tuple(t.shape), t.numel() * t.element_size()) for name, t in state(model()).items()
    }
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-00000005"):
        rows = listing(path)
        assert {row.name: (row.shape, row.bytes) for row in rows} == expected
        assert {row.file for row in rows} == {"rank-00000.safetensors"}
        assert {row.dtype for row in rows} == {"F32", "I64"}


def test_listing_names_the_files_of_a_split_tensor(tmp_path: Path) -> None:
    import threading

    meeting = threading.Barrier(2)

    def save(rank: int) -> None:
        piece = Piece(torch.full((2,), rank), (4,), (2 * rank,))
        Store(tmp_path).save(
            1, {"w": piece}, {}, rank=rank, world=2, barrier=lambda: (meeting.wait(20), None)[1]
        )

    other = threading.Thread(target=save, args=(1,))
    other.start()
    save(0)
    other.join()
    (row,) = listing(tmp_path)
    assert (row.shape, row.bytes, row.file) == ((4,), 32, "rank-00000.safetensors and 1 more")


def test_a_model_directory_is_listed_from_its_headers(tmp_path: Path) -> None:
    held = shards(tmp_path / "hf")
    rows = listing(tmp_path / "hf")
    assert {row.name: (row.file, row.shape, row.bytes) for row in rows} == {
        name: (file, tuple(t.shape), t.numel() * t.element_size())
        for file, tensors in held.items()
        for name, t in tensors.items()
    }
    report = verify(tmp_path / "hf")
    assert report.ok and report.tensors == 3 and report.bytes == 24 + 16 + 10


def _lose_shard(path: Path) -> None:
    (path / "model-00002-of-00002.safetensors").unlink()


def _cut_shard(path: Path) -> None:
    shard = path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])


def _index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BROKEN: dict[str, tuple[Any, str]] = {
    "a missing shard": (_lose_shard, "missing shard"),
    "a cut shard": (_cut_shard, "claim"),
    "an index that leaves the directory": (
        lambda p: _index(p, {"a": "../model-00001-of-00002.safetensors"}),
        "no file name",
    ),
    "an index that lacks a tensor": (
        lambda p: _index(p, {"a": "model-00001-of-00002.safetensors"}),
        "tensor 'b' is in no file",
    ),
    "an index with a tensor too many": (
        lambda p: _index(
            p,
            {
                "a": "model-00001-of-00002.safetensors",
                "b": "model-00001-of-00002.safetensors",
                "c": "model-00002-of-00002.safetensors",
                "d": "model-00002-of-00002.safetensors",
            },
        ),
        "it is in no file",
    ),
    "an index without names": (lambda p: _index(p, []), "no weight_map"),
    "an index that is no JSON": (
        lambda p: (p / "model.safetensors.index.json").write_text("{"),
        "not JSON",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_directory_is_refused_by_name(case: str, tmp_path: Path) -> None:
    breaks, expected = BROKEN[case]
    shards(tmp_path / "hf")
    breaks(tmp_path / "hf")
    with pytest.raises(ModelError, match=expected):
        listing(tmp_path / "hf")
    (problem,) = verify(tmp_path / "hf").problems
    assert expected in problem


def test_a_directory_without_a_readable_config_is_reported(tmp_path: Path) -> None:
    shards(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").unlink()
    assert "config.json" in verify(tmp_path / "hf").problems[0]


def test_pickles_and_strangers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        find(tmp_path / "absent")
    with pytest.raises(ModelError, match="neither a checkpoint, nor a run, nor a model"):
        listing(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle"):
        listing(tmp_path)


def test_verify_reports_every_damage(run: Path) -> None:
    report = verify(run)
    assert report.ok and report.tensors == 2 * len(state(model()))
    store = run / "checkpoints"
    flip(store / "step-00000005" / "rank-00000.safetensors", -1)
    flip(store / "step-00000010" / "index.json", 100)
    report = verify(run)
    assert not report.ok and len(report.problems) == 2
    assert "step-00000005" in report.problems[0] and "tensor" in report.problems[0]
    assert "step-00000010/index.json" in report.problems[1]
    assert not verify(store / "step-00000010").ok


def test_a_checkpoint_gives_its_model_back(run: Path) -> None:
    again = load_model(Store(run / "checkpoints").open(10))
    assert same(again, model(1))


def test_a_checkpoint_that_is_not_the_model_it_names_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=9)
    good = state(model())
    some = next(name for name in good if name.startswith(MODEL))
    wide = {**META, "model": {**META["model"], "hidden": 2**23, "vocab_size": 2**23}}  # type: ignore[dict-item]
    cases: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
        ({n: t for n, t in good.items() if n != some}, META, "is missing"),
        ({**good, MODEL + "strange": torch.ones(1)}, META, "'model.strange' is not of the model"),
        ({**good, some: torch.ones(1)}, META, "has shape"),
        (good, {}, "does not say which model"),
        (good, wide, "has shape"),
    ]
    for step, (pieces, meta, expected) in enumerate(cases):
        store.save(step, pieces, meta)
        with pytest.raises(CheckpointError, match=expected):
            load_model(store.open(step))
    store.save(50, good, {"model": {"hidden": "wide"}})
    with pytest.raises(ConfigError, match="step-00000050: model"):
        load_model(store.open(50))


def test_a_checkpoint_is_rewritten_whole_and_cast(run: Path, tmp_path: Path) -> None:
    written = convert(run, tmp_path / "out", to="checkpoint", dtype="bf16", step=5)
    saved = Store(tmp_path / "out").open(5)
    assert written == saved.path and saved.meta == {**META, "step": 5}
    for name, tensor in state(model(0)).items():
        expected = tensor.bfloat16() if name.startswith(MODEL) else tensor
        assert torch.equal(saved.tensor(name), expected)


def test_there_and_back_again(run: Path, tmp_path: Path) -> None:
    from shoal.model import huggingface

    (run / "tokenizer.json").write_text('{"added_tokens": []}')
    written = convert(run, tmp_path / "hf", to="huggingface")
    assert (written / "tokenizer.json").read_text() == '{"added_tokens": []}'
    assert written == tmp_path / "hf" and find(written).kind == "huggingface"
    assert same(huggingface.read(written), model(1))
    assert verify(written).ok
    convert(written, tmp_path / "back", to="checkpoint")
    assert same(load_model(Store(tmp_path / "back").open(0)), model(1))
    convert(written, tmp_path / "half", dtype="bf16")
    assert {row.dtype for row in listing(tmp_path / "half")} == {"BF16"}
    assert same(huggingface.read(tmp_path / "half"), model(1).to(torch.bfloat16))


def test_wrong_conversions_are_refused_and_leave_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="to = 'pickle'"):
        convert(run, out, to="pickle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype = 'int4'"):
        convert(run, out, dtype="int4")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 5, 10"):
        convert(run, out, to="checkpoint", step=7)
    with pytest.raises(CheckpointError, match="holds step 5, not 7"):
        convert(run / "checkpoints" / "step-00000005", out, to="checkpoint", step=7)
    with pytest.raises(ModelError, match="exists already"):
        convert(run, run, to="checkpoint")
    flip(run / "checkpoints" / "step-00000010" / "rank-00000.safetensors", -1)
    with pytest.raises(CorruptError, match="step 5 in"):
        convert(run, out, to="checkpoint")
    assert not out.exists()
