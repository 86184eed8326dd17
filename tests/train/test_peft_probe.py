"""Short trainings say which method learns; the search halves its candidates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from shoal.app.commands.explain import app  # noqa: E402
from shoal.core.errors import ModelError, PlanError  # noqa: E402
from shoal.core.parts import Choice  # noqa: E402
from shoal.corpora.tokenizer import train  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.train.peft.probe import candidates, probe, search  # noqa: E402
from shoal.train.zoo import random  # noqa: E402


@pytest.mark.slow
def test_probe_and_search(tmp_path: Path, corpus: Path) -> None:
    place = tmp_path / "model"
    huggingface.write(place, random("shoal-0.3m"))
    with pytest.raises(ModelError, match="tokenizer"):
        probe(place, [Choice(name="lora")])
    texts = [path.read_text(errors="ignore") for path in sorted(corpus.glob("*.py"))[:6]]
    train(texts, 1024).save(str(place / "tokenizer.json"))
    data = {"name": "text", "path": str(corpus), "pattern": "*.py"}
    strong = Choice(name="lora", options={"r": 8, "targets": "*_proj"})
    weak = Choice(name="ia3")
    result = probe(place, [strong, weak], steps=20, seq_len=32, data=data)  # type: ignore[arg-type]
    assert result["lora"] > result["ia3"]
    ranked = search(place, [weak, strong], steps=10, seq_len=32, data=data)  # type: ignore[arg-type]
    assert [one.method for one in ranked] == [strong, weak]
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"model": str(place), "data": data, "steps": 2, "seq_len": 32}))
    words = ["peft", str(job), "-m", "1xH100", "--search", str(place), "-o", "json"]
    none = CliRunner().invoke(app, [*words, "--share", "0.0001"])
    assert isinstance(none.exception, PlanError)
    assert "none of 28 candidates fits" in str(none.exception)
    shown = CliRunner().invoke(app, [*words, "--share", "0.009"])
    assert shown.exit_code == 0, shown.exception
    rows = json.loads(shown.stdout)
    assert rows and all(row["share"] <= 0.009 for row in rows)
    steps = [row["steps"] for row in rows]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_candidates_are_where_which_and_how_large() -> None:
    result = candidates()
    assert len(result) == 4 * (3 + 3 + 1)
    assert len({str(one) for one in result}) == len(result)
