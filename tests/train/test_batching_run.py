"""Real runs whose documents are distributed: the same losses as without, killed and resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.errors import RankError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.train.run import execute

pytestmark = [pytest.mark.multi, pytest.mark.slow]

from test_run import kill_at, losses  # noqa: E402

Make = Callable[..., TrainPlan]


def test_dealt_out_documents_give_the_same_run(make_plan: Make, tmp_path: Path) -> None:
    common = {"packing": "document", "shard": "zero1", "steps": 12}
    batching = {"name": "bytescale", "capacity_tokens": 32}
    plan = make_plan(parallel={"dp": 2}, batching=batching, **common)
    execute(make_plan(parallel={"dp": 2}, **common), tmp_path / "plain")
    run = tmp_path / "run"
    with pytest.raises(RankError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        execute(plan, run, inject=kill_at(8))
    execute(plan, run, resume=True)
    ours, theirs = losses(run), losses(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    # Sums are rounded in another order, which an optimizer's steps make more of.
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-5) for step in range(4))
    assert all(ours[step] == pytest.approx(theirs[step], rel=5e-3) for step in ours)
    events = [e for e in read_events(run / "events.jsonl") if e["kind"] == "step"]
    assert any(e["shared_sequences"] for e in events), "some document needs two ranks"
    assert all(e["sequences"] >= e["shared_sequences"] and e["micro_steps"] for e in events)
    assert all(0 <= e["idle_share"] < 1 for e in events)


def test_activations_of_long_documents_go_to_the_host(make_plan: Make, tmp_path: Path) -> None:
    common = {"packing": "document", "shard": "zero1", "steps": 3, "parallel": {"dp": 2}}
    batching = {"name": "bytescale", "capacity_tokens": 24, "offload": "auto"}
    execute(make_plan(**common), tmp_path / "plain")
    execute(make_plan(batching=batching, **common), tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-5) for step in ours)
    events = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["kind"] == "step"]
    assert sum(e["offloaded_bytes"] for e in events) > 0
    assert all(e["kept_bytes"] > 0 for e in events)
