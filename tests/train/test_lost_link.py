"""The cable of a host is pulled in the middle of a step: the pair is named, and the run goes on."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.checkpoint.store import Store
from shoal.core.errors import RankError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.machine.emulate import EmulatedNetwork, emulate, unavailable
from shoal.parallel.comm.heartbeat import Heartbeat
from shoal.train.memory import EmulatedHosts
from shoal.train.run import execute

pytestmark = [pytest.mark.multi, pytest.mark.slow]

from test_run import losses  # noqa: E402

Make = Callable[..., TrainPlan]
STEPS, SAVED, CUT = 16, 8, 11


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    """Two hosts with 100 MB/s."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with emulate(2, bandwidth=1e8) as hosts:
        yield hosts


def test_a_link_that_disappears_is_named_and_the_run_goes_on(
    network: EmulatedNetwork, make_plan: Make, tmp_path: Path
) -> None:
    plan = make_plan(
        parallel={"dp": 2},
        sync={"name": "co2", "tau": 4},
        steps=STEPS,
        timeout_s=4,
        checkpoint={"every": SAVED},
    )
    run = tmp_path / "run"
    ended: list[float] = []
    with pulled(network, run) as at, pytest.raises(RankError) as caught:
        try:
            execute(plan, run, hosts=EmulatedHosts(network, 1))
        finally:
            ended.append(time.monotonic())
    assert ended[0] - at[0] < 60, "nobody waits for as long as TCP does, which is minutes"
    said = str(caught.value)
    assert "rank 0 -> rank 1" in said or "rank 1 -> rank 0" in said
    assert "in all_reduce of step " in said
    assert "last checkpoint: step 8; continue with --resume" in said
    assert "\n" not in said and "Traceback" not in said, "one line, whoever is to blame"
    for log in (run / "ranks").glob("*.log"):
        assert "Traceback" not in log.read_text()
    steps = Store(run / "checkpoints").steps()
    assert steps == (SAVED,), "the round that was under way left nothing"
    Store(run / "checkpoints").open(SAVED)  # every byte is verified
    assert not half_written(run)
    untouched = shutil.copytree(run / "checkpoints", tmp_path / "before")
    execute(plan, run, resume=True, hosts=EmulatedHosts(network, 1))
    assert set(losses(run)) == set(range(STEPS))
    done = [e for e in read_events(run / "events.jsonl") if e["kind"] == "step"]
    # Both runs have done the steps between the checkpoint and the cut.
    twice = {e["step"]: e["loss"] for e in done[: -len(range(SAVED, STEPS))] if e["step"] >= SAVED}
    assert {SAVED, SAVED + 1} <= twice.keys()
    assert twice == {step: losses(run)[step] for step in twice}, "the same bits"
    for name in untouched.glob("step-00000008/*.safetensors"):
        there = run / "checkpoints" / name.relative_to(untouched)
        assert there.read_bytes() == name.read_bytes()


@contextmanager
def pulled(network: EmulatedNetwork, run: Path) -> Iterator[list[float]]:
    """A cable that is pulled in step CUT, and plugged in again in the end; when that was."""
    at: list[float] = []
    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.005):
            beat = Heartbeat.read(run / "ranks" / "rank-0.beat", 0)
            if beat is not None and beat.step >= CUT:
                network.plug(1, into=False)
                at.append(time.monotonic())
                return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield at
    finally:
        over.set()
        thread.join()
        network.plug(1, into=True)


def half_written(run: Path) -> list[Path]:
    """What a write that was not finished would have left."""
    results = [*run.rglob(".*"), *run.rglob("*.tmp*"), *run.rglob("*.old")]
    return [path for path in results if path.name != ".lock"]
