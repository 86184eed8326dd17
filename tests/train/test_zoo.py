"""The zoo: names, shapes, recipes, fresh weights, and the cache of trained models."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from shoal.core.errors import ModelError
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
        "shoal-mdlm-3m",
        "shoal-ar-3m",
    )
    for name in zoo.names():
        config, job = zoo.config(name), zoo.recipe(name)
        assert config.shape().num_layers == shapes.find(name).num_layers
        assert config.tied
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


def test_trained_is_cached_by_recipe(tmp_path, monkeypatch):
    run = importlib.import_module("shoal.train.run")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    runs = []

    def train(job, run_dir, ranks, *, machine):
        assert machine == "probed"
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
    assert [path.name for path in (tmp_path / "zoo").iterdir()] == [place.name]
    monkeypatch.setitem(zoo._RECIPES, "shoal-0.3m", (1000, 128, 16, 1e-3))
    assert zoo.trained("shoal-0.3m") != place


def test_needs_no_torch():
    code = (
        "import sys, shoal.train.zoo as z; z.recipe('shoal-4m'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
