"""The program of examples/retrieve does what its first line says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")

PLACE = Path(__file__).parents[2] / "examples" / "retrieve"


def test_none_is_missed() -> None:
    assert [path.stem for path in PLACE.glob("*.py")] == ["rag"]


@pytest.mark.slow
def test_an_answer_has_sources(tmp_path: Path) -> None:
    """A tiny model makes vectors and text; it knows nothing, and the words find the passage."""
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
    huggingface.write(tmp_path / "model", model)
    train([""], 257).save(str(tmp_path / "model" / "tokenizer.json"))
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "sea.md").write_text("The sea is salt.\n\nTides follow the moon.\n")
    (folder / "bread.txt").write_text("Bread is baked of flour, water and salt.\n\nServe it warm.")
    spec = importlib.util.spec_from_file_location("rag", PLACE / "rag.py")
    assert spec is not None and spec.loader is not None
    rag = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rag)
    answer, sources = rag.main(str(tmp_path / "model"), str(folder), "What do tides follow?")
    assert isinstance(answer, str) and len(sources) == 3
    # First by its words, which no other passage has, and somewhere by its vector.
    assert sources[0] == "sea.md, paragraph 2"
