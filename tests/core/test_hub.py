"""Models and data sets by their ids, from a hub on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
sys.path.insert(0, str(Path(__file__).parent))

from hub_server import OLD, SHA, Hub, hub, reach

from shoal.core.config import resolve
from shoal.core.errors import DataError, ModelError
from shoal.core.hub import local_data, local_model, model_id
from shoal.corpora import CORPORA
from shoal.corpora.files import from_path
from shoal.ir import TrainJob

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"[]",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"import os",
    "original/model.safetensors": b"again",
    "consolidated.safetensors": b"again",
    "old:config.json": b'{"old": 1}',
    "old:model.safetensors": b"older",
}
CHATS = "".join(
    json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{n}"}]}
    )
    + "\n"
    for n in range(50)
).encode()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model and a data set, an empty cache and an empty working directory."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with hub() as result:
        reach(monkeypatch, result.address, tmp_path / "cache")
        result.repos = {
            ("models", "org/tiny"): MODEL,
            ("models", "org/pickled"): {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
            ("datasets", "org/chats"): {
                "README.md": b"about",
                "loader.py": b"import os",
                "train.jsonl": CHATS,
                "test.jsonl": CHATS * 2,
            },
        }
        yield result


def test_fetches_what_cannot_execute(here: Hub) -> None:
    path = Path(local_model("org/tiny"))
    names = sorted(str(one.relative_to(path)) for one in path.rglob("*"))
    assert names == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(here.sent) == names and path.name == SHA
    assert local_model("hf://org/tiny") == str(path)
    old = Path(local_model("org/tiny@old"))
    assert (old / "config.json").read_bytes() == b'{"old": 1}' and old.name == OLD
    with pytest.raises(ModelError, match=r"org/tiny@new.*has no revision 'new'; name a branch"):
        local_model("org/tiny@new")
    with pytest.raises(ModelError, match=r"org/pickled.*no config\.json with weights in safetens"):
        local_model("org/pickled")


@pytest.mark.parametrize("variable", ["SHOAL_OFFLINE", "HF_HUB_OFFLINE"])
def test_asks_nothing_offline(variable: str, here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelError, match=rf"org/tiny'.*{variable} is set.*hf download org/tiny"):
        local_model("org/tiny")
    assert here.asked == 0
    monkeypatch.delenv(variable)
    path = local_model("org/tiny")
    monkeypatch.setenv(variable, "1")
    asked = here.asked
    assert local_model("org/tiny") == path and here.asked == asked
    assert resolve(TrainJob).value == TrainJob(), "the variable is no key of a job"


def test_says_what_was_tried(here: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=rf"no such directory here, and {here.address} has no such"
    ):
        local_model("org/none", hint="a shape's name")
    here.gated.add("org/tiny")
    with pytest.raises(ModelError, match=r"granted access.*set HF_TOKEN, or give the path"):
        local_model("org/tiny")
    # A port on which nothing listens.
    reach(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    with pytest.raises(ModelError) as caught:
        local_model("org/other", hint="a shape's name")
    message = str(caught.value)
    assert "cannot be fetched from http://127.0.0.1:9" in message and "\n" not in message
    assert message.endswith("give the path of a model directory here, or a shape's name")


def test_what_is_here_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("shoal-4m", "jobs/tiny.yaml", "a/b/c", "/org/tiny", "./org/tiny", "org/x.gguf"):
        assert model_id(words) is None, words
    wanted = model_id("org/tiny@v1.0")
    assert wanted is not None and (wanted.repo, wanted.revision) == ("org/tiny", "v1.0")
    Path("org").mkdir()
    assert model_id("org/tiny") is None, "a path that is misspelled asks nobody"
    assert local_model("org/tiny") == "org/tiny"
    with pytest.raises(ModelError, match=r"expected hf://org/name"):
        model_id("hf://org/tiny/config.json")


def test_data_sets(here: Hub) -> None:
    choice = from_path("hf://datasets/org/chats/train.jsonl")
    assert choice.name == "chat" and choice.options["pattern"] == "train.jsonl"
    assert sorted(here.sent) == ["train.jsonl"]
    assert len(list(CORPORA.build(choice).documents())) == 50
    whole = {"name": "chat", "path": "hf://datasets/org/chats"}
    assert len(list(CORPORA.build(whole).documents())) == 150
    assert sorted(set(here.sent)) == ["test.jsonl", "train.jsonl"]
    with pytest.raises(DataError, match=r"no file there that matches \*\.parquet"):
        local_data("hf://datasets/org/chats/*.parquet")
    with pytest.raises(DataError, match=r"ends with \.jsonl, \.parquet or \.txt"):
        local_data("hf://datasets/org/chats/loader.py")
    with pytest.raises(DataError, match="has no such dataset"):
        from_path("hf://datasets/org/none")
