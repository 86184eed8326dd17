"""A checkpoint that is copied while the optimizer already works is that of its step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.checkpoint.store import Store  # noqa: E402
from shoal.core.meter import read_events  # noqa: E402
from shoal.ir import TrainPlan  # noqa: E402
from shoal.train.layout import RunDir  # noqa: E402
from shoal.train.run import execute, prepare_run  # noqa: E402

# A rank whose copies begin when training waits for them, or after a second.
_LATE = """
import sys, threading
from pathlib import Path
from shoal.checkpoint.modes import lazy
from shoal.train.layout import RunDir
from shoal.train.worker import run_rank

waited = threading.Event()
save, wait, fill = lazy.LazySaver.save, lazy.Capture.wait, lazy.ByteSource.fill

def late_save(self, *given):
    waited.clear()
    return save(self, *given)

def late_wait(self, names):
    waited.set()
    wait(self, names)

def late_fill(self, *given):
    waited.wait(1)
    fill(self, *given)

lazy.LazySaver.save, lazy.Capture.wait, lazy.ByteSource.fill = late_save, late_wait, late_fill
run_rank(RunDir(Path(sys.argv[1])), resume=False)
"""


@pytest.mark.slow
@pytest.mark.multi
def test_a_lazy_save_under_fuyou_is_the_blocking_one(
    make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    def plan(mode: str) -> TrainPlan:
        made: dict[str, Any] = {"every": 1, "keep": 9, "mode": mode}
        return make_plan(
            model="shoal-0.3m",
            steps=3,
            seq_len=32,
            grad_clip=0,
            offload={"name": "fuyou", "device_budget": "64MiB"},
            checkpoint=made,
        )

    execute(plan("blocking"), tmp_path / "blocking")
    late = RunDir(tmp_path / "lazy")
    prepare_run(plan("lazy"), late, resume=False)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "SHOAL_RENDEZVOUS": f"file://{tmp_path}/met"}
    subprocess.run(
        [sys.executable, "-c", _LATE, str(tmp_path / "lazy")],
        env={**os.environ, **alone},
        check=True,
        timeout=120,
    )
    events = list(read_events(tmp_path / "lazy" / "events.jsonl"))
    assert [e for e in events if e["kind"] == "checkpoint_failed"] == []
    stores = [Store(tmp_path / name / "checkpoints") for name in ("blocking", "lazy")]
    assert stores[0].steps() == stores[1].steps() == (1, 2, 3)
    for step in stores[0].steps():
        one, other = (store.open(step) for store in stores)
        assert one.names() == other.names()
        for name in one.names():
            assert torch.equal(one.tensor(name), other.tensor(name)), (step, name)
