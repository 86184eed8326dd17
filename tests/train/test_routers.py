"""Routers of a Duo model: trained alone, set to shares, studied beside an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from own_home import own_home

torch = pytest.importorskip("torch")

from shoal.app.cli import app  # noqa: E402
from shoal.claims.bench.duo import each_loss, random_routes, study  # noqa: E402
from shoal.core.errors import ConfigError, ModelError, PlanError  # noqa: E402
from shoal.ir import Architecture  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.duo import BIG, computing, ffn_flops, router_routes  # noqa: E402
from shoal.train.routers import (  # noqa: E402
    calibrate,
    samples,
    take_routers,
    train_routers,
)
from shoal.train.zoo import random  # noqa: E402

LAYERS = 3


class Text:
    """Tokens that repeat: some places are easy, others are not."""

    def __init__(self, size: int = 4000) -> None:
        source = np.random.default_rng(0)
        self._tokens = np.where(
            np.arange(size) % 4 == 0, source.integers(0, 50, size), np.arange(size) % 7
        )

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, out_N: np.ndarray) -> None:
        out_N[:] = self._tokens[start : start + len(out_N)]


def model(layers: int = LAYERS, ffn: Any = None, **changes: Any):
    config = {
        "vocab_size": 53, "hidden": 24, "num_layers": layers, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "ffn_hidden": 64, "max_position": 64, "initializer_range": 0.3,
        "architecture": {"ffn": ffn or {"name": "duo", "router": "linear"}},
    }  # fmt: skip
    return random(ModelConfig(**{**config, **changes})).eval()


def share(net, tokens, shift: float) -> float:
    with computing(net, torch.tensor(shift)):
        routes = router_routes(net, tokens)
    flops = ffn_flops(net.config, routes.movedim(0, -1)).double()
    return float(flops.mean() / ffn_flops(net.config, torch.full((LAYERS,), BIG)))


def test_routers_learn_and_nothing_else_changes():
    net = model()
    before = {name: one.clone() for name, one in net.state_dict().items()}
    train_routers(net, Text(), budget=0.4, steps=12, seq_len=16, batch=2, lr=3e-2, weight=50.0)
    changed = {name for name, one in net.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {name for name in before if ".router." in name}
    assert all(one.requires_grad for one in net.parameters())
    tokens, _ = samples(Text(), 4, 24)
    # Routes are drawn in training and chosen in serving, so the share is near the budget only.
    assert 0.1 < share(net, tokens, 0.0) < 0.75


def test_a_calibrated_share_is_spent():
    net = model()
    tokens, _ = samples(Text(), 8, 40)
    shifts = calibrate(net, tokens)
    assert len(shifts) >= 8
    for wanted, shift in shifts:
        assert share(net, tokens, shift) == pytest.approx(wanted, abs=1e-6)
    ffn = Architecture.model_validate(
        {"ffn": {"name": "duo", "router": "linear", "shifts": shifts}}
    ).ffn
    other, _ = samples(Text(), 6, 33)
    for wanted in (0.2, 0.5, 0.8):
        assert share(net, other, ffn.shift(wanted)) == pytest.approx(wanted, abs=0.08)
    assert share(net, other, ffn.shift(1.0)) == 1.0
    assert ffn.shift(None) == 0.0
    rising = [ffn.shift(one / 50) for one in range(1, 51)]
    assert rising == sorted(rising, reverse=True)


def test_the_study_orders_the_ways():
    net = model()
    inputs, targets = samples(Text(), 3, 20)
    result = study(net, inputs, targets, inputs, budget=1)
    oracle = {arm.chosen: arm for arm in result.of("oracle")}
    assert list(oracle) == ["0 big", "1 big", "2 big", "any"]
    whole = model(ffn={"name": "duo", "router": "fixed"})
    whole.load_state_dict(net.state_dict())
    all_big = next(arm for arm in result.of("fixed") if arm.chosen == "BBB")
    assert all_big.loss == pytest.approx(each_loss(whole, inputs, targets).mean(), abs=1e-5)
    assert oracle["any"].loss <= oracle["1 big"].loss <= oracle["0 big"].loss
    assert oracle["any"].loss < all_big.loss
    most = [arm for arm in result.arms if arm.share == 1.0]
    assert {arm.name for arm in most} >= {"random", "fixed", "router"}
    assert len({round(arm.loss, 5) for arm in most if arm.name != "oracle"}) == 1
    assert [len(rows) for rows in result.layers["big"].values()] == [LAYERS, LAYERS]
    assert sum(result.layers[route]["router"][0] for route in result.layers) == pytest.approx(1)
    assert sum(result.layers["big"]["oracle"]) <= 1.0 + 1e-9
    assert result.evaluations == 27


@pytest.mark.parametrize("way", ["beam", "descent"])
def test_a_search_of_few_patterns_is_no_better_than_all(way):
    net = model()
    inputs, targets = samples(Text(), 2, 12)
    exact = study(net, inputs, targets, inputs, budget=2)
    result = study(net, inputs, targets, inputs, budget=2, search_by=way, width=27)
    for ours, theirs in zip(result.of("oracle"), exact.of("oracle"), strict=True):
        assert ours.loss >= theirs.loss - 1e-6
    if way == "beam":  # wide enough to be exact without a budget
        assert result.of("oracle")[-1].loss == pytest.approx(exact.of("oracle")[-1].loss, abs=1e-5)


def test_chance_spends_what_it_is_told():
    net = model()
    whole = float(ffn_flops(net.config, torch.full((LAYERS,), BIG)))
    for wanted in (0.03, 0.25, 0.8, 1.0):
        routes = random_routes(wanted, net, (40, 50), 1)
        spent = float(ffn_flops(net.config, routes.movedim(0, -1)).double().mean()) / whole
        assert spent == pytest.approx(wanted, abs=0.02)


def test_bad_input_is_named(tmp_path):
    net = model()
    tokens, targets = samples(Text(), 2, 8)
    with pytest.raises(PlanError, match="--budget = 4"):
        study(net, tokens, targets, tokens, budget=4, search_by="beam")
    with pytest.raises(PlanError, match="search: beam"):
        study(model(9), tokens, targets, tokens)
    with pytest.raises(ModelError, match="ffn = duo"):
        study(model(ffn="plain"), tokens, targets, tokens)
    with pytest.raises(ModelError, match="ffn = duo"):
        train_routers(model(ffn="plain"), Text(), budget=0.5)
    with pytest.raises(ConfigError, match=r"routers.budget = 1.5"):
        train_routers(net, Text(), budget=1.5)
    with pytest.raises(ModelError, match="chance"):
        calibrate(model(ffn={"name": "duo", "router": "random"}), tokens)
    with pytest.raises(ConfigError, match="more than 5000 tokens"):
        samples(Text(), 2, 5000)
    huggingface.write(tmp_path / "deep", model(5))
    with pytest.raises(ModelError, match="layers = 5: expected 3"):
        take_routers(net, tmp_path / "deep")
    huggingface.write(tmp_path / "plain", model(ffn="plain"))
    with pytest.raises(ModelError, match="a directory of a model of ffn = duo"):
        take_routers(net, tmp_path / "plain")


@pytest.mark.parametrize(
    "shifts", [((0.5, 1.0), (0.4, 0.0)), ((0.4, 0.0), (0.5, 1.0)), ((0.0, 3.0),), ((1.2, 3.0),)]
)
def test_shifts_out_of_order_are_refused(shifts):
    with pytest.raises((ModelError, ValueError), match="shifts"):
        Architecture.model_validate({"ffn": {"name": "duo", "shifts": shifts}})


def test_routers_of_another_model_can_be_taken(tmp_path):
    net, other = model(), model()
    with torch.no_grad():
        for name, one in other.named_parameters():
            if ".router." in name:
                one.add_(1.0)
    huggingface.write(tmp_path / "other", other)
    take_routers(net, tmp_path / "other")
    for (name, mine), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    vocab = {f"t{i}": i for i in range(50)} | {"<|endoftext|>": 50}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for number in range(20):
        line = " ".join(f"t{(number * place) % 50}" for place in range(300))
        (tmp_path / "text" / f"{number}.txt").write_text(line)
    huggingface.write(tmp_path / "duo", model(), tmp_path / "tokenizer.json")
    text = ["--text", str(tmp_path / "text")]
    out = str(tmp_path / "routed")
    done = CliRunner().invoke(
        app, ["model", "routers", str(tmp_path / "duo"), "--out", out, "--steps", "5",
              "--length", "16", "-o", "json", *text]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    shifts = json.loads(done.stdout)["shifts"]
    ffn = huggingface.read_config(Path(out)).architecture.ffn
    assert ffn.router == "linear"
    assert [list(one) for one in ffn.shifts] == shifts
    picture = tmp_path / "duo.svg"
    done = CliRunner().invoke(
        app, ["explain", "duo", out, "--tokens", "128", "--length", "16", "--picture", str(picture),
              *text], env={"COLUMNS": "200"}
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for word in ("oracle", "router", "random", "fixed", "as trained", "difficulty"):
        assert word in done.output
    assert picture.read_text().count("<svg") >= 1
