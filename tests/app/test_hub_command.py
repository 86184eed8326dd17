"""Commands on models and data sets of the hub, as a user types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from own_home import own_home

pytest.importorskip("torch")
pytest.importorskip("huggingface_hub")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "core")]

from hub_server import SHA, Hub, hub, reach  # noqa: E402

from shoal_command import shoal  # noqa: E402

pytestmark = [pytest.mark.multi, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a tiny model and chats."""
    from shoal.corpora.tokenizer import train
    from shoal.model import huggingface
    from shoal.train.zoo import random

    model = tmp_path / "model"
    huggingface.write(model, random("shoal-0.3m"))
    train(["one two three"] * 9, 290).save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {"messages": [{"role": r, "content": f"{r} {n}"} for r in ("user", "assistant")]}
        for n in range(100)
    ]
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with hub() as result:
        result.repos = {
            ("models", "org/tiny"): {one.name: one.read_bytes() for one in model.iterdir()},
            ("datasets", "org/chats"): {
                "train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
            },
        }
        reach(monkeypatch, result.address, tmp_path / "hub")
        monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
        yield result


def test_trains_a_model_of_the_hub(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "train", "--model", "org/tiny", "--finetune", "lora", "--steps", "2",
        "--machine", "laptop", "--data", "hf://datasets/org/chats", "--anyway",
        "--set", "seq_len=64", "--set", "global_batch=4", "--set", "threads=1",
        "--set", "precision=fp32", "--set", "evaluation.final=false",
    ]  # fmt: skip
    done = shoal(*words)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("weights: loaded from /") and first.endswith(
        f"org--tiny/snapshots/{SHA}"
    )
    assert "loss on" in done.stderr
    export = Path("runs/run/export")
    assert (export / "chat_template.jinja").read_text() == TEMPLATE
    # What was fetched is there without a network; planning never asks.
    monkeypatch.setenv("SHOAL_OFFLINE", "1")
    asked = here.asked
    done = shoal("model", "ls", "org/tiny@main")
    assert done.returncode == 0 and "embed" in done.stdout, done.stderr
    done = shoal("serve", "org/other")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "SHOAL_OFFLINE is set" in done.stderr and "give the path of a model" in done.stderr
    assert here.asked == asked


def test_says_what_it_trains_and_what_it_tried(
    here: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reach(monkeypatch, "http://127.0.0.1:9", tmp_path / "none")
    done = shoal("train", "--model", "Qwen/Qwen3-0.6B", "--machine", "laptop", "--steps", "1")
    assert done.returncode == 2
    assert "Qwen/Qwen3-0.6B cannot be fetched from http://127.0.0.1:9" in done.stderr
    assert "the name of a shape without a slash" in done.stderr
    assert "Traceback" not in done.stderr
    done = shoal("plan", "train", "Qwen/Qwen3-0.6B", "-m", "8xH100", "--tokens", "1B")
    assert done.returncode == 0 and here.asked == 0, done.stderr
    done = shoal("train", "--model", "shoal-0.3m", "--machine", "16xH100", "--steps", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("weights: random, of seed 0: shoal-0.3m names a shape")


def test_ids_are_taken_wherever_a_model_is(here: Hub, tmp_path: Path) -> None:
    import shoal as package
    from shoal.api.loading import SavedModel, model_directory
    from shoal.core.errors import ConfigError, ModelError
    from shoal.core.hub import fetched, repo_of
    from shoal.ir import ServeJob

    there = model_directory("org/tiny")
    assert there == model_directory("hf://org/tiny@main") and there.name == SHA
    assert repo_of(there) == "org/tiny" and repo_of(tmp_path) is None
    saved = package.load("org/tiny")
    assert isinstance(saved, SavedModel) and saved.config.vocab_size > 0
    options = package.SamplingParams(temperature=0, max_tokens=4)
    with package.LLM("org/tiny", threads=1) as llm:
        (answer,) = llm.generate("one two", options, use_tqdm=False)
        assert llm.job.model == str(there) and len(answer.outputs[0].token_ids) <= 4
    with package.serve("org/tiny", threads=1) as server:
        assert server.model == "org/tiny"
    with pytest.raises(ModelError, match="has no such model"):
        package.load("org/none")
    with pytest.raises(ConfigError, match="given twice, org/tiny and x"):
        package.plan("org/tiny", "laptop", model="x")
    here.repos["models", "org/sql"] = {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"",
        "pytorch_model.bin": b"may execute",
    }
    Path("runs/a").mkdir(parents=True)
    job = fetched(ServeJob(model="org/tiny", adapters={"sql": "org/sql", "own": "runs/a"}))
    assert job.model == str(there) and job.adapters["own"] == "runs/a"
    assert sorted(one.name for one in Path(job.adapters["sql"]).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        fetched(ServeJob(model=str(there), adapters={"a": "org/tiny@old"}))


@pytest.mark.parametrize(
    "words",
    [
        "model generate org/tiny --tokens 4 -o json",
        "model ls org/tiny",
        "model convert org/tiny out --dtype bf16",
        "model inspect org/tiny",
        "bench serve --model org/tiny --requests 2 --anyway --profile 0 --no-score "
        "--set max_position=64 --set threads=1 -m laptop -q",
        "bench tune --model org/tiny --tuner exhaustive --knob max_running=2 --knob kv_tokens=256 "
        "--knob max_step_tokens=64 --knob block_size=8 --requests 2 --width 9 --anyway -q "
        "--set max_position=64 --set threads=1",
        "serve org/tiny --dry-run",
    ],
)
def test_commands_take_ids(here: Hub, words: str) -> None:
    done = shoal(*words.split())
    assert done.returncode == 0, done.stderr
    fetched = "--dry-run" not in words
    assert ("model.safetensors" in here.sent) == fetched
