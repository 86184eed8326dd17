"""Real runs over real processes: equal over ranks, resumed bit for bit, failures named."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from own_home import own_home
from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.store import Store
from shoal.core.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    DataError,
    PlanError,
    RankError,
)
from shoal.core.meter import read_events
from shoal.cost.score import Score
from shoal.ir import TrainPlan
from shoal.train.layout import RunDir
from shoal.train.report import report_of_ended
from shoal.train.run import execute

pytestmark = pytest.mark.multi

Make = Callable[..., TrainPlan]


def losses(run: Path) -> dict[int, float]:
    """Step -> loss; the last time a step was done counts."""
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["kind"] == "step"}


def kill_at(step: int, rank: int = -1, number: int = signal.SIGKILL) -> Callable[..., None]:
    """Send a signal to a rank when ``step`` was done."""

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            os.kill(supervisor.processes[rank].pid, number)

    return inject


@pytest.fixture(scope="module")
def straight(make_plan: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, never interrupted, evaluated, exported and reported."""
    run = tmp_path_factory.mktemp("straight") / "run"
    execute(make_plan(parallel={"dp": 2}, evaluation={"every": 12, "sample_tokens": 8}), run)
    return run


@pytest.fixture(scope="module")
def alone(make_plan: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one rank that is never interrupted."""
    run = tmp_path_factory.mktemp("alone") / "run"
    execute(make_plan(), run)
    return losses(run)


def test_a_run_leaves_everything(straight: Path) -> None:
    kinds = [e["kind"] for e in read_events(straight / "events.jsonl")]
    assert kinds[0] == "start"
    assert kinds.count("step") == 24
    assert kinds.count("checkpoint") == 4
    assert kinds.count("eval") == 2  # in the middle, and of everything in the end
    assert {"sample", "end", "totals"} <= set(kinds)
    result = losses(straight)
    assert result[23] < result[0], "it learns"
    report = json.loads((straight / "report.json").read_text())
    assert report["measured"]["finished"] == 1
    assert set(report["errors"]) >= {"step_s", "tokens_per_s", "memory_bytes", "wire_bytes"}
    assert abs(report["errors"]["wire_bytes"]) < 0.01, "bytes are counted, not guessed"
    page = (straight / "report.html").read_text()
    assert "Prediction beside measurement" in page
    assert page.count("<svg") == 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert (straight / "export" / "config.json").exists()
    assert [row for row in Score().rows() if row.quantity == "step_s"]


def test_a_finished_run_that_is_resumed_does_nothing_again(straight: Path) -> None:
    plan = TrainPlan.load(straight / "plan.yaml")
    events, rows = (straight / "events.jsonl").read_bytes(), len(Score().rows())
    seen: list[dict[str, Any]] = []
    report = execute(plan, straight, resume=True, watch=seen.append)
    assert [event["kind"] for event in seen] == ["finished"]
    assert report.measured == json.loads((straight / "report.json").read_text())["measured"]
    assert (straight / "events.jsonl").read_bytes() == events
    assert len(Score().rows()) == rows
    longer = plan.model_copy(update={"job": plan.job.model_copy(update={"steps": 30})})
    assert report_of_ended(longer, RunDir(straight)) is None


def gpus(plan: TrainPlan) -> TrainPlan:
    """The same plan for GPUs."""
    device = plan.machine.device.model_copy(update={"kind": "gpu", "num_cores": None})
    machine = plan.machine.model_copy(update={"device": device})
    job = plan.job.model_copy(update={"kernel": {}})
    return plan.model_copy(update={"machine": machine, "job": job})


def test_a_plan_for_gpus_is_refused_on_a_cpu(
    make_plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever call, before anything is written."""
    from shoal.core.errors import PlanError
    from shoal.train.run import train
    from shoal.train.watch.robust import Robust, execute_robust

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = gpus(make_plan())
    for start in (
        lambda: execute(plan, tmp_path / "run"),
        lambda: execute_robust(plan, tmp_path / "run", Robust()),
        lambda: train(plan.job, tmp_path / "run", machine=plan.machine),
    ):
        with pytest.raises(PlanError, match=r"made for GPUs of described.*the CPU.*--anyway"):
            start()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_plan_for_gpus_on_a_cpu_is_never_scored(
    make_plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = execute(gpus(make_plan(steps=3)), tmp_path / "run", anyway=True)
    assert report.device == "cpu"
    assert report.errors == {}
    rows = [row for row in Score().rows() if row.quantity == "step_s"]
    assert [(row.elsewhere, row.error) for row in rows] == [(True, None)]
    assert rows[0].predicted is not None
    assert Score().errors() == []


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_resumed_losses_are_bit_equal(
    make_plan: Make,
    straight: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    plan = make_plan(parallel={"dp": 2}, evaluation={"every": 12, "sample_tokens": 8})
    run = tmp_path / "run"
    with pytest.raises(RankError, match=r"rank 1 of 2 \(pid \d+, host .*\) was killed by SIGKILL"):
        execute(plan, run, inject=kill_at(7))
    report = execute(plan, run, resume=True)
    assert losses(run) == losses(straight)
    assert report.measured["starts"] == 2
    events = list(read_events(run / "events.jsonl"))
    resumed = [e["step"] for e in events if e["kind"] == "start" and e["resumed"]]
    assert len(resumed) == 1
    assert resumed[0] in (6, 12, 18), "from a checkpoint before the kill"
    record_property("figure", f"{len(losses(run))} losses equal to the bit")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in SAVE_MODES if mode != "blocking"])
def test_a_run_that_saves_behind_is_killed_and_goes_on_with_equal_bits(
    mode: str, make_plan: Make, straight: Path, tmp_path: Path
) -> None:
    saves = {"every": 2, "keep": 3, "mode": mode, "path": str(tmp_path / "elsewhere")}
    plan = make_plan(
        parallel={"dp": 2}, evaluation={"every": 12, "sample_tokens": 8}, checkpoint=saves
    )
    run = tmp_path / "run"
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        execute(plan, run, inject=kill_at(7))
    whole = Store(tmp_path / "elsewhere").steps()
    execute(plan, run, resume=True)
    assert losses(run) == losses(straight)
    events = list(read_events(run / "events.jsonl"))
    # What is saved behind training may not be whole when a rank is killed.
    assert [e["step"] for e in events if e["kind"] == "start" and e["resumed"]] == [*whole[-1:]]
    assert Store(tmp_path / "elsewhere").steps() == (20, 22, 24)
    assert not (run / "checkpoints").exists()


@pytest.mark.slow
def test_the_interval_is_chosen_from_what_is_measured_and_shown(
    make_plan: Make, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    saves = {"every": "auto", "mode": "snapshot"}
    execute(make_plan(parallel={"dp": 2}, steps=10, checkpoint=saves), run)
    events = list(read_events(run / "events.jsonl"))
    chosen = [e for e in events if e["kind"] == "checkpoint_interval"]
    assert chosen[0]["step"] == 6 and chosen[0]["steps"] >= 1
    assert chosen[0]["stall_s"] > 0 and chosen[0]["mtbf_s"] > 3600
    assert next(e["step"] for e in events if e["kind"] == "checkpoint") == 5


@pytest.mark.slow
def test_a_lost_rank_restarts_the_run_by_itself(
    make_plan: Make, straight: Path, tmp_path: Path
) -> None:
    plan = make_plan(parallel={"dp": 2}, evaluation={"every": 12, "sample_tokens": 8})
    once: list[int] = []

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if not once and event["kind"] == "step" and event["step"] == 13:
            once.append(1)
            os.kill(supervisor.processes[0].pid, signal.SIGKILL)

    seen: list[dict[str, Any]] = []
    execute(plan, tmp_path / "run", restarts=1, inject=inject, watch=seen.append)
    assert [e for e in seen if e["kind"] == "restart"]
    assert losses(tmp_path / "run") == losses(straight)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["replicated", "zero1", "zero3"])
def test_one_two_one_ranks(
    make_plan: Make, alone: dict[int, float], tmp_path: Path, shard: str
) -> None:
    run = tmp_path / "run"
    for number, (ranks, part) in enumerate([(1, "replicated"), (2, shard), (1, "replicated")]):
        plan = make_plan(parallel={"dp": ranks}, shard=part)
        if number < 2:
            # Ends early by losing a rank after some checkpoint.
            with pytest.raises(RankError):
                execute(plan, run, resume=number > 0, inject=kill_at(6 * number + 6))
        else:
            execute(plan, run, resume=True)
    result = losses(run)
    assert alone.keys() == result.keys()
    for step, loss in alone.items():
        assert abs(result[step] / loss - 1) <= 2e-5, step


@pytest.mark.slow
def test_a_hanging_rank_is_named_with_its_stack(
    make_plan: Make, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    plan = make_plan(parallel={"dp": 2}, timeout_s=4, steps=10_000, checkpoint={"every": 0})
    began: list[float] = []

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 5 and not began:
            began.append(time.monotonic())
            os.kill(supervisor.processes[1].pid, signal.SIGSTOP)

    with pytest.raises(RankError, match=r"rank 1 of 2 .* hangs in step \d+") as caught:
        execute(plan, tmp_path / "run", inject=inject)
    took_s = time.monotonic() - began[0]
    assert took_s < 4 + 5
    record_property("figure", f"named after {took_s:.1f} s, with a limit of 4 s")
    assert "stopped" in str(caught.value), "a stopped process has no stack to give"
    stack = (tmp_path / "run" / "ranks" / "rank-0.stack").read_text()
    assert "loop.py" in stack, "the waiting rank told where it waits"


@pytest.mark.slow
def test_ctrl_c_saves_and_stops(make_plan: Make, tmp_path: Path) -> None:
    # A shell that puts the tests into the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _stops_on_ctrl_c(make_plan, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def _stops_on_ctrl_c(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan(parallel={"dp": 2}, steps=100_000, checkpoint={"every": 0})
    timer: list[threading.Timer] = []

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 5 and not timer:
            timer.append(threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)))
            timer[0].start()

    with pytest.raises(KeyboardInterrupt):
        execute(plan, tmp_path / "run", watch=watch)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["measured"]["finished"] == 0
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    stops = [e for e in events if e["kind"] == "stop"]
    saves = [e["step"] for e in events if e["kind"] == "checkpoint"]
    assert len(stops) == 1
    assert len(saves) == 1
    assert saves[0] == max(losses(tmp_path / "run")) + 1


@pytest.mark.slow
def test_a_rank_that_dies_while_the_run_stops_restarts_nothing(
    make_plan: Make, tmp_path: Path
) -> None:
    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 5:
            pid = supervisor.processes[1].pid
            os.kill(pid, signal.SIGSTOP)  # so that nobody can save
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = make_plan(parallel={"dp": 2}, steps=100_000, checkpoint={"every": 3})
    try:
        with pytest.raises(RankError, match="rank 1 of 2"):
            execute(plan, tmp_path / "run", inject=inject, restarts=3)
    finally:
        signal.signal(signal.SIGINT, before)
    kinds = [e["kind"] for e in read_events(tmp_path / "run" / "events.jsonl")]
    assert kinds.count("start") == 1


def test_bad_starts(make_plan: Make, straight: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already contains a run"):
        execute(make_plan(parallel={"dp": 2}), straight)
    with pytest.raises(ConfigError, match="at most 1024, the longest position"):
        execute(make_plan(seq_len=2048, global_batch=1, microbatch=1), tmp_path / "long")
    with pytest.raises(PlanError, match="key/value heads: 1"):
        execute(make_plan(parallel={"tp": 2}), tmp_path / "tp")


def test_a_corpus_shorter_than_one_batch(make_plan: Make, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too short to train on\n" * 3)
    plan = make_plan(data={"name": "text", "path": str(tmp_path / "a.txt")})
    with pytest.raises(DataError, match="one batch"):
        execute(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing of a run that cannot start"


@pytest.mark.slow
def test_resume_refuses_another_run(make_plan: Make, straight: Path, tmp_path: Path) -> None:
    import shutil

    for change, message in (
        ({"seed": 1}, "saved with seed = 0"),
        ({"model": "shoal-0.3m"}, "checkpoint of another model"),
        ({"optimizer": "muon"}, "saved with optimizer = 'adamw'"),
    ):
        run = tmp_path / message.split()[-1].strip("'")
        shutil.copytree(straight, run)
        with pytest.raises(CheckpointError, match=message):
            execute(make_plan(**change), run, resume=True)


@pytest.mark.slow
def test_a_flipped_byte_is_refused_and_the_previous_step_offered(
    make_plan: Make, straight: Path, tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(straight, run)
    newest = run / "checkpoints" / "step-00000024" / "rank-00001.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    plan = make_plan(parallel={"dp": 2}, steps=26)
    with pytest.raises(CorruptError, match=r"(?s)rank-00001\.safetensors.*18"):
        execute(plan, run, resume=True)
    execute(plan, run, from_step=18)
    assert max(losses(run)) == 25


@pytest.mark.slow
def test_torchrun_joins(make_plan: Make, tmp_path: Path, straight: Path) -> None:
    plan = make_plan(parallel={"dp": 2}, evaluation={"every": 12, "sample_tokens": 8})
    plan.save(tmp_path / "plan.yaml")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "shoal",
            "train",
            "--plan",
            str(tmp_path / "plan.yaml"),
            "--dir",
            str(tmp_path / "run"),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(tmp_path / "run") == losses(straight)
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.slow
def test_choices_run_together(make_plan: Make, tmp_path: Path) -> None:
    """Document masks, bf16, Muon over ZeRO-1, recomputation, accumulation and more sinks."""
    plan = make_plan(
        parallel={"dp": 2},
        packing="document",
        precision="bf16",
        optimizer="muon",
        shard="zero1",
        lr_schedule="wsd",
        recompute="full",
        microbatch=2,
        sinks=[{"name": "tensorboard", "path": str(tmp_path / "board")}],
    )
    execute(plan, tmp_path / "run")
    result = losses(tmp_path / "run")
    assert result[23] < result[0] - 0.5
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_compiled_equals_eager(make_plan: Make, tmp_path: Path) -> None:
    changes = {"model": "shoal-0.3m", "steps": 4, "checkpoint": {"every": 0}}
    execute(make_plan(**changes), tmp_path / "eager")
    execute(make_plan(**changes, compile=True, timeout_s=240), tmp_path / "compiled")
    eager, compiled = losses(tmp_path / "eager"), losses(tmp_path / "compiled")
    for step, loss in eager.items():
        assert compiled[step] == pytest.approx(loss, rel=1e-4)
