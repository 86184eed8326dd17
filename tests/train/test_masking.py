"""Hiding tokens, and training a model to find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from own_home import own_home

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, PlanError  # noqa: E402
from shoal.core.meter import read_events  # noqa: E402
from shoal.cost.shapes import find  # noqa: E402
from shoal.ir import TrainJob  # noqa: E402
from shoal.parallel.legal import check_split  # noqa: E402
from shoal.train.masking import given, masked  # noqa: E402


def test_shares_are_even_and_weights_their_inverse():
    tokens = torch.randint(0, 50, (64, 400), generator=torch.Generator().manual_seed(0))
    result = masked(tokens, 50, seed=3, step=7, first=0, total=64)
    hidden = result.inputs == 50
    share = hidden.double().mean(1)
    assert (share - 1 / result.weights).abs().max() < 0.12
    spread = (1 / result.weights).sort().values
    assert (spread.diff() - 1 / 64).abs().max() < 1e-3, "one share in each 64th"
    assert torch.equal(result.targets[hidden], tokens[hidden])
    assert (result.targets[~hidden] == -100).all()
    assert torch.equal(result.inputs[~hidden], tokens[~hidden])
    # A hidden token counts 1/t, so that every token counts 1 on average.
    counted = (hidden * result.weights[:, None]).mean()
    assert counted == pytest.approx(1.0, abs=0.05)


def test_what_is_hidden_does_not_depend_on_who_asks():
    tokens = torch.randint(0, 50, (8, 30), generator=torch.Generator().manual_seed(0))
    whole = masked(tokens, 50, seed=3, step=2, first=0, total=8)
    for first in (0, 4):
        part = masked(tokens[first : first + 4], 50, seed=3, step=2, first=first, total=8)
        for one, other in zip(part, whole, strict=True):
            assert torch.equal(one, other[first : first + 4])
    other = masked(tokens, 50, seed=3, step=3, first=0, total=8)
    assert not torch.equal(other.inputs, whole.inputs)


def test_what_is_given_is_never_hidden():
    tokens = torch.tensor([[1, 9, 2, 3, 9, 4], [5, 6, 7, 9, 8, 8], [1, 2, 3, 4, 5, 6]])
    kept = given(tokens, 9)
    assert kept.tolist() == [
        [True, True, False, False, False, False],
        [True, True, True, True, False, False],
        [True] * 6,
    ]
    for step in range(20):
        result = masked(tokens, 50, seed=0, step=step, first=0, total=3, kept_bT=kept)
        assert torch.equal(result.inputs[kept], tokens[kept])


def test_jobs_that_cannot_be():
    with pytest.raises(ConfigError, match=r"packing = stream with learn_after"):
        TrainJob(learn_after="=")
    job = TrainJob(model="shoal-mdlm-3m", parallel={"tp": 2})
    with pytest.raises(PlanError, match=r"masked-diffusion model: use dp"):
        check_split(job, find("shoal-mdlm-3m"))


def plan_of(model: str, **changes):
    from shoal.machine.described import load
    from shoal.train.planning import plan_job

    job = {
        "model": model, "data": {"name": "tasks", "problems": 400, "heldout": 12},
        "packing": "padded", "learn_after": "=", "seq_len": 80, "global_batch": 8,
        "steps": 12, "threads": 1, "precision": "fp32", "optimizer": {"name": "muon", "lr": 3e-3},
        "checkpoint": {"every": 4}, **changes,
    }  # fmt: skip
    return plan_job(TrainJob.model_validate(job), load("laptop"))


@pytest.mark.slow
@pytest.mark.multi
def test_a_resumed_training_is_the_same(tmp_path: Path, monkeypatch):
    from shoal.model import huggingface
    from shoal.train.run import execute

    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    shape = tmp_path / "tiny.yaml"
    shape.write_text(
        "{name: tiny, family: mdlm, num_layers: 1, hidden: 32, num_heads: 2, num_kv_heads: 2, "
        "head_dim: 16, ffn_hidden: 48, vocab_size: 258, max_position: 96, tied: true}"
    )

    def losses(run):
        events = read_events(run / "events.jsonl")
        return {e["step"]: e["loss"] for e in events if e["kind"] == "step"}

    report = execute(plan_of(str(shape)), tmp_path / "straight")
    straight = losses(tmp_path / "straight")
    assert straight[11] < straight[0] - 0.4
    assert 0 < report.measured["bits_per_byte"] < 20
    config = huggingface.read_config(tmp_path / "straight" / "export")
    assert (config.family, config.mask_token_id, config.causal) == ("mdlm", 257, False)
    execute(plan_of(str(shape)), tmp_path / "straight", from_step=4)
    assert losses(tmp_path / "straight") == straight
