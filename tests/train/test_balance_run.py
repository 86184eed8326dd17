"""Real runs of a mixture of experts: biases and experts that moved are saved, and balance told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import RankError  # noqa: E402
from shoal.core.meter import read_events  # noqa: E402
from shoal.ir import TrainPlan  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.train.run import execute  # noqa: E402

pytestmark = [pytest.mark.multi, pytest.mark.slow]

from test_run import kill_at, losses  # noqa: E402

Make = Callable[..., TrainPlan]


def steps(run: Path) -> dict[int, dict[str, Any]]:
    return {e["step"]: e for e in read_events(run / "events.jsonl") if e["kind"] == "step"}


def test_a_killed_run_goes_on_with_its_biases(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan(
        model="shoal-moe-4m",
        steps=15,
        parallel={"dp": 2, "ep": 2, "gradient_slices": [200_000, 50_000]},
        architecture={
            "moe": {
                "gate": {"name": "sigmoid", "bias_rate": 0.01},
                "capacity_factor": 1.25,
                "aux_loss": 0.001,
            }
        },
    )
    execute(plan, tmp_path / "straight")
    run = tmp_path / "run"
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        execute(plan, run, inject=kill_at(9))
    execute(plan, run, resume=True)
    assert losses(run) == losses(tmp_path / "straight")
    whole = steps(tmp_path / "straight")
    for name in ("imbalance", "dropped", "balance"):
        result = {step: event[name] for step, event in steps(run).items()}
        assert result == {step: event[name] for step, event in whole.items()}
    assert all(1 <= event["imbalance"] <= 8 for event in whole.values())
    assert any(event["dropped"] > 0 for event in whole.values())
    (hidden,) = {event["gradients_hidden_bytes"] for event in whole.values()}
    assert hidden > 250_000
    assert all(event["gradients_after_bytes"] > 0 for event in whole.values())
    exported = [huggingface.read(d / "export", torch.float32) for d in (run, tmp_path / "straight")]
    biases = [one.blocks[1].mlp.router_bias.detach() for one in exported]
    assert torch.equal(*biases)
    assert 0 < float(biases[0].abs().max()) <= 15 * 0.01 + 1e-6
    assert exported[0].config.architecture.moe.gate.name == "sigmoid"


_HALVES = slice(2), slice(2, 4)


def test_experts_that_moved_go_on_anywhere(make_plan: Make, tmp_path: Path) -> None:
    small = {"model": "shoal-moe-4m", "steps": 6, "seq_len": 32, "checkpoint": {"every": 3}}
    placer = {"name": "fssdp", "resharding_every": 3, "slack": 0.0}
    run = tmp_path / "run"
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        execute(
            make_plan(**small, parallel={"dp": 2, "ep": 2, "placer": placer}),
            run,
            inject=kill_at(4),
        )
    execute(make_plan(**small), run, resume=True)
    notes = [e for e in read_events(run / "events.jsonl") if e["kind"] == "step"]
    # Two ranks went on with what had moved, and one from where that was saved.
    moved, resumed = ([e["loss"] for e in notes if e["step"] in (3, 4)][part] for part in _HALVES)
    assert moved == pytest.approx(resumed, rel=2e-4)
    assert sum(e.get("copies_exposed_s", 0) for e in notes) > 0
    assert max(e.get("copies_bytes", 0) for e in notes) > 0
    moves = {e["step"]: (e["moved_experts"], e["moved_bytes"]) for e in notes if "moved_bytes" in e}
    assert list(moves) == [2]
    assert all(count > 0 and size > 0 for count, size in moves.values())
