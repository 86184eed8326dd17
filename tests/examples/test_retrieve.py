"""The program of examples/retrieve does what its first line says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PLACE = Path(__file__).parents[2] / "examples" / "retrieve"


def test_none_is_missed() -> None:
    assert sorted(path.stem for path in PLACE.glob("*.py")) == ["lookup", "rag", "towers"]


def program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, PLACE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def tiny_model(place: Path) -> Path:
    from shoal.corpora.tokenizer import train
    from shoal.model import huggingface
    from shoal.model.config import ModelConfig
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    config = ModelConfig(
        vocab_size=257, hidden=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        ffn_hidden=64, max_position=2048, eos_token_id=0,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, seed=3)
    huggingface.write(place / "model", model)
    train([""], 257).save(str(place / "model" / "tokenizer.json"))
    return place / "model"


@pytest.mark.slow
def test_a_text_goes_on_behind_what_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "sea.md").write_text("The sea is salt. Tides follow the moon.")
    (folder / "bread.md").write_text("Bread is baked of flour, water and salt.")
    said, places = program("lookup").main(
        str(tiny_model(tmp_path)), str(folder), "What do tides follow?", k=1
    )
    assert isinstance(said, str) and places == ["sea.md, byte 0"]


@pytest.mark.slow
def test_an_answer_has_sources(tmp_path: Path) -> None:
    """A tiny model makes vectors and text; it knows nothing, and the words find the passage."""
    model = tiny_model(tmp_path)
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "sea.md").write_text("The sea is salt.\n\nTides follow the moon.\n")
    (folder / "bread.txt").write_text("Bread is baked of flour, water and salt.\n\nServe it warm.")
    answer, sources = program("rag").main(str(model), str(folder), "What do tides follow?")
    assert isinstance(answer, str) and len(sources) == 3
    # First by its words, which no other passage has, and somewhere by its vector.
    assert sources[0] == "sea.md, paragraph 2"


@pytest.mark.slow
def test_towers_learn_and_shrink(capsys: pytest.CaptureFixture[str]) -> None:
    program("towers")
    said = capsys.readouterr().out
    assert said.count(" -> ") == 3 and "surely the same best document" in said
