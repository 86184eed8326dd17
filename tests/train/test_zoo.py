"""The zoo: names, shapes, recipes, fresh weights, and the cache of trained models."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from threading import Barrier

import pytest

from shoal.core.errors import CheckpointError, ModelError, ShoalError
from shoal.cost import shapes
from shoal.train import zoo


def test_every_model_has_a_shape_and_a_recipe():
    assert zoo.names() == (
        "shoal-0.3m",
        "shoal-1m",
        "shoal-4m",
        "shoal-4m-h128",
        "shoal-8m",
        "shoal-16m",
        "shoal-moe-4m",
        "shoal-draft-1m",
        "shoal-draft-8l",
        "shoal-draft-4m",
        "shoal-27m",
        "shoal-mdlm-3m",
        "shoal-ar-3m",
    )
    for name in zoo.names():
        config, job = zoo.config(name), zoo.recipe(name)
        assert config.shape().num_layers == shapes.find(name).num_layers
        assert config.tied == (job.data.name in ("stdlib", "tasks"))
        assert job.model == name
        assert job.seq_len <= config.max_position
        assert job.tokens is not None
    assert zoo.config("shoal-moe-4m").family == "mixtral"


def test_unknown_names():
    for call in (zoo.config, zoo.recipe, zoo.random, zoo.trained):
        with pytest.raises(ModelError, match=r"zoo model = 'shoal-4': .*did you mean 'shoal-4m'"):
            call("shoal-4")


def test_random_depends_on_the_seed_alone():
    torch = pytest.importorskip("torch")
    first, again, other = (zoo.random("shoal-0.3m", seed) for seed in (0, 0, 1))
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert zoo.random(zoo.config("shoal-0.3m")).config.hidden == 64


def test_two_who_ask_at_once_have_it_made_once(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    from shoal.train.zoo.places import stored_directory

    probing = importlib.import_module("shoal.machine.probing")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "probe", lambda fast: "probed")
    place, runs, both = tmp_path / "zoo" / "made", [], Barrier(2)

    def make(run_dir, machine, left):
        assert machine == "probed"
        assert left == run_dir.exists()
        if left:
            raise CheckpointError("nothing was saved when it was interrupted")
        run_dir.mkdir()
        (run_dir / "mark").write_text("whole")
        runs.append(run_dir)
        return run_dir

    def ask():
        both.wait()
        return stored_directory(place, "mark", make)

    (tmp_path / "zoo" / ".made.run").mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in (pool.submit(ask), pool.submit(ask))] == [place, place]
    assert len(runs) == 1

    def fails(run_dir, machine, left):
        run_dir.mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(ShoalError, match="SHOAL_HOME"):
        stored_directory(tmp_path / "zoo" / "other", "mark", fails)
    assert not (tmp_path / "zoo" / ".other.run").exists()


def test_trained_is_cached_by_recipe(tmp_path, monkeypatch):
    run = importlib.import_module("shoal.train.run")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    runs = []

    def train(job, run_dir, ranks, *, machine, resume):
        assert machine == "probed"
        assert not resume
        runs.append((job, ranks))
        (run_dir / "export").mkdir(parents=True)
        (run_dir / "export" / "config.json").write_text("{}")

    monkeypatch.setattr(run, "train", train)
    probing = importlib.import_module("shoal.machine.probing")
    monkeypatch.setattr(probing, "probe", lambda fast: "probed")
    place = zoo.trained("shoal-0.3m")
    assert place.parent == tmp_path / "zoo"
    assert place.name.startswith("shoal-0.3m-")
    assert zoo.trained("shoal-0.3m") == place
    assert runs == [(zoo.recipe("shoal-0.3m"), 1)]
    left = [path.name for path in (tmp_path / "zoo").iterdir()]
    assert sorted(left) == [f".{place.name}.lock", place.name]
    monkeypatch.setitem(zoo._RECIPES, "shoal-0.3m", (1000, 128, 16, 1e-3))
    assert zoo.trained("shoal-0.3m") != place


def test_needs_no_torch():
    code = (
        "import sys, shoal.train.zoo as z; z.recipe('shoal-4m'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_to_be_decoded_share_text_and_tokenizer():
    names = [name for name in zoo.names() if zoo.corpus(name).name == "mixed"]
    assert names == ["shoal-draft-1m", "shoal-draft-8l", "shoal-draft-4m", "shoal-27m"]
    assert len({str(zoo.recipe(name).data) for name in names}) == 1
    assert {zoo.config(name).vocab_size for name in names} == {2048}
    assert all(zoo.config(name).max_position >= 1024 for name in names)


def test_a_model_is_named_by_what_its_recipe_says():
    """Keys that jobs and shapes get later change no name; another recipe does."""
    from shoal.train.zoo import _digest

    job = zoo.recipe("shoal-27m")
    assert _digest(job) == "bab2dcbe70f5"
    changed = type(job).model_validate({**job.model_dump(exclude_unset=True), "tokens": 1})
    assert _digest(changed) != _digest(job)


def test_what_a_model_has_learned_is_told_by_source(tmp_path):
    """A bigram model beside one that says nothing; the gap decides."""
    pytest.importorskip("torch")
    from shoal.core.errors import ShoalError
    from shoal.core.parts import Choice
    from shoal.corpora.tokens import prepare
    from shoal.model import huggingface
    from shoal.train.zoo.quality import HeldOutLosses, learned

    sources = {
        kind: {"name": "synthetic", "kind": kind, "size_bytes": 60_000, "heldout_every": 4}
        for kind in ("logs", "arithmetic")
    }
    data = Choice(name="mixed", options={"sources": sources})
    tokens = prepare(data, "bpe", 512, cache=tmp_path / "cache")
    config = zoo.config("shoal-0.3m").model_copy(update={"vocab_size": 512})
    huggingface.write(tmp_path / "model", zoo.random(config))
    result = learned(tmp_path / "model", tokens, data, max_tokens=4000)
    assert set(result.model) == {"logs", "arithmetic", "all"}
    # Untrained, it knows nothing; which token follows which is most of such text.
    assert all(abs(loss - math.log(512)) < 0.2 for loss in result.model.values())
    assert all(0.3 < loss < 3.5 for loss in result.bigram.values())
    low, high = sorted(result.bigram[kind] for kind in sources)
    assert low < result.bigram["all"] < high
    with pytest.raises(ShoalError, match="below a bigram model"):
        result.check("shoal-27m")
    HeldOutLosses(model={"all": 1.0}, bigram={"all": 1.31}).check("shoal-27m")
    assert result.lines()[0].startswith("logs: ")
