"""The programs of examples/federate do what their first lines say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from own_home import own_home
from shoal.core.parts import table
from shoal.machine.described import load

PLACE = Path(__file__).parents[2] / "examples" / "federate"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    load("laptop").model_copy(update={"name": "local"}).save(tmp_path / "home" / "machine.yaml")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PLACE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_none_is_missed() -> None:
    assert sorted(path.stem for path in PLACE.glob("*.py")) == [
        "adapters",
        "hospitals",
        "no_server",
    ]


@pytest.mark.slow
def test_hospitals(tmp_path: Path) -> None:
    module = example("hospitals")
    path = tmp_path / "tumours.csv"
    module.write_table(path)
    report = module.main(path, "diagnosis", "hospital", clock="virtual")
    assert report.measured["accuracy"] > 0.9
    assert len({one["samples"] for one in report.details["clients"]}) == 3


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    from shoal.corpora.tokenizer import train
    from shoal.cost.shapes import find
    from shoal.model.config import ModelConfig
    from shoal.model.huggingface import write
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    texts = [path.read_text() for path in PLACE.glob("*.py")]
    tokenizer = tmp_path / "tokenizer.json"
    train(texts, 512).save(str(tokenizer))
    model = Transformer(
        ModelConfig.from_shape(find("shoal-1m").model_copy(update={"vocab_size": 512}))
    )
    init_weights(model, 0)
    write(tmp_path / "base", model, tokenizer)
    report = example("adapters").main(tmp_path / "base", tmp_path, rounds=1, clock="virtual")
    whole = sum(file.stat().st_size for file in (tmp_path / "base").glob("*.safetensors"))
    assert report.measured["up_bytes"] / 4 < whole / 20
    assert report.details["curve"][-1]["loss"] < report.details["curve"][0]["loss"]


@pytest.mark.slow
@pytest.mark.skipif("gossip" not in table("job"), reason="there is no kind of job gossip")
def test_no_server(tmp_path: Path) -> None:
    report = example("no_server").main(tmp_path, clock="virtual")
    assert report.measured["accuracy"] > 0.5
