"""The whole line in one go: probe, plan, train, lose a rank, resume, serve, talk, gallery."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shoal.core.config import resolve
from shoal.core.errors import RankError
from shoal.core.files import shoal_home
from shoal.core.sizes import human_bytes
from shoal.core.tables import digits
from shoal.ir import ServeJob, TrainJob, TrainPlan, TrainReport, compared
from shoal.plan.strategy import PLANNERS
from shoal.plan.table import spell
from shoal.train.planning import plan_job
from shoal.train.run import Watch, execute
from shoal.train.sampling import continue_text
from shoal.train.supervise import Supervisor

Bar = Callable[[float, float, str], None]

# From here on a larger model makes better use of the time.
_LONG_MINUTES = 10.0
# Causes of a step's time, and plans beside the best, that are printed.
_CAUSES, _OTHERS = 4, 3


def demo_job(minutes: float, ranks: int) -> TrainJob:
    """The demo's job: a small model on the standard library's source.

    Args:
        minutes: how long to train, by the plan's estimate.
        ranks: data-parallel ranks.
    """
    long = minutes >= _LONG_MINUTES
    return TrainJob.model_validate(
        {
            "name": "demo",
            "model": "shoal-8m" if long else "shoal-4m",
            "seq_len": 256,
            "global_batch": 16 * ranks // 2 if ranks > 1 else 16,
            "microbatch": None,
            "minutes": minutes,
            "optimizer": {"name": "muon", "lr": 4e-3 if long else 5e-3},
            "lr_schedule": "wsd",
            "shard": "zero1" if ranks > 1 else "replicated",
            "parallel": {"dp": ranks},
            "checkpoint": {"every": 100 if long else 25, "keep": 2},
            "evaluation": {"every": 500 if long else 150, "tokens": 8192, "sample_tokens": 48},
        }
    )


def run_demo(
    directory: Path,
    *,
    minutes: float,
    ranks: int,
    say: Callable[[str], None],
    work: Callable[[str], AbstractContextManager[Bar]],
    training: Callable[[], AbstractContextManager[Watch]],
    sets: Sequence[str] = (),
) -> TrainReport:
    """Do all of it, reporting each part.

    Args:
        directory: where the run and the machine go.
        minutes: minutes of training.
        ranks: ranks to start; one of them is killed on purpose when there are two.
        say: prints a line.
        work: a progress bar for one piece of work.
        training: a progress bar for the training.
        sets: ``path=value`` words over the job of the demo.

    Raises:
        ShoalError: something did not work.
    """
    from shoal.machine.probing import probe

    job = resolve(TrainJob, base=demo_job(minutes, ranks), environment={}, sets=sets).value
    run_dir = _fresh(directory)
    say("1. Probe this machine  (shoal probe)")
    with work("probing") as bar:
        machine = probe(fast=True, progress=bar)
    machine.save(shoal_home() / "machine.yaml", header="Measured by shoal demo.")
    for dtype, rate in machine.device.matmul_flops.items():
        say(f"   matrix product {dtype}: {digits(rate / 1e9)} GFLOP/s")
    for place, reason in machine.sources.items():
        if place.startswith("skipped.matmul."):
            say(f"   {place.removeprefix('skipped.')}: not measured: {reason}")

    say("2. Plan  (shoal plan train)")
    plan = plan_job(job, machine)
    ranked: list[TrainPlan] = PLANNERS.build("search").plan(job, machine)
    _tell_plan(plan, ranked, say)

    fatal = None if ranks == 1 else _fatal_step(plan)
    say(f"3. Train{', and kill one rank' * (fatal is not None)}  (shoal train)")
    if fatal is None:
        short = f"{plan.job.steps} steps end before one can be lost; give more --minutes"
        say(f"   no rank is killed, and step 4 is left out: {'one rank' if ranks == 1 else short}")
    report = _train(plan, run_dir, say, training, fatal)

    say("5. Generate  (shoal model generate)")
    prompt = "def main():\n"
    text = continue_text(run_dir / "export", prompt, 64, temperature=0.6, top_k=20)
    for line in (prompt + text).splitlines():
        say(f"   | {line}")

    say("6. Compare prediction and measurement  (shoal score)")
    for label, predicted, measured, error in compared(report):
        say(f"   {label:32} {predicted:>16} {measured:>20} {error:>9}")

    say("7. Serve  (shoal serve)")
    _talk(run_dir / "export", say)

    say("8. Claims of papers  (shoal claims report)")
    _gallery(directory / "gallery", say)

    say(f"report:    {run_dir / 'report.html'}")
    say(f"gallery:   {directory / 'gallery' / 'index.html'}")
    say(f"dashboard: shoal dash --runs {directory}")
    say(f"model:     {run_dir / 'export'} (a Hugging Face directory; shoal serve takes it)")
    return report


def _fresh(directory: Path) -> Path:
    """Where this run goes: earlier demos stay."""
    for number in itertools.count(1):
        run_dir = directory / ("run" if number == 1 else f"run-{number}")
        if not run_dir.exists():
            return run_dir
    raise AssertionError("numbers do not end")


def _talk(model: Path, say: Callable[[str], None]) -> None:
    """Serve the model, and ask it by the usual client."""
    from openai import OpenAI

    from shoal.serve.http.server import running

    began = time.monotonic()
    with running(ServeJob(model=str(model))) as server:
        say(f"   ready after {time.monotonic() - began:.1f} s at {server.url}")
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            name = server.model
            text = "import os\n"
            result = client.completions.create(
                model=name, prompt=text, max_tokens=32, temperature=0, timeout=60
            )
            for line in _written(text + result.choices[0].text):
                say(f"   | {line}")
            question = "Write a function that returns the sum of two numbers."
            say(f"   you:   {question}")
            spoken = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": question}],
                max_tokens=48,
                temperature=0.6,
                seed=0,
                timeout=60,
            )
            answer = (spoken.choices[0].message.content or "").strip()
            for place, line in enumerate(_written(answer)):
                say(f"   {'model:' if place == 0 else '      '} {line}")


def _written(text: str) -> list[str]:
    """The lines with something in them: a model of minutes likes empty ones."""
    return [line for line in text.splitlines() if line.strip()]


def _gallery(out: Path, say: Callable[[str], None]) -> None:
    """Write the gallery of claims, from the results of a clone or the verdicts of the package."""
    from shoal.claims.gallery import index_rows, write_gallery
    from shoal.claims.gallery.papers import counts
    from shoal.claims.shipped import results_directory

    results = results_directory()
    write_gallery(results, out)
    for status, number in counts(index_rows(results)).items():
        if number:
            say(f"   {number:4} {status}")


def _tell_plan(plan: TrainPlan, others: Sequence[TrainPlan], say: Callable[[str], None]) -> None:
    """The plan that wins, why, where its time goes, and what the next ones would take."""
    estimate = plan.estimate
    assert estimate is not None
    step = estimate.step_s.scaled(1e3)
    say(f"   {spell(plan)}")
    say(
        f"   {plan.job.steps} steps of {step.value:.0f} ms ({step.low:.0f} to {step.high:.0f}), "
        f"{estimate.tokens_per_s:,.0f} tokens/s, "
        f"{human_bytes(estimate.memory_total)} a rank; bottleneck: {estimate.bound}"
    )
    largest = sorted(estimate.terms_s.items(), key=lambda item: -item[1])[:_CAUSES]
    shares = [f"{cause} {s / estimate.step_s.value:.0%}" for cause, s in largest if s > 0]
    say(f"   step time: {', '.join(shares)}")
    if plan.why:
        say(f"   best plan: {plan.why}")
    # Plans that differ only in what their words leave out count once.
    distinct = {spell(other): other for other in reversed(others)}
    distinct.pop(spell(plan), None)
    for words, other in list(reversed(distinct.items()))[:_OTHERS]:
        assert other.estimate is not None
        ratio = other.estimate.step_s.value / estimate.step_s.value
        say(f"   not {words}: step time {ratio:.2f} times as long")


def _fatal_step(plan: TrainPlan) -> int | None:
    """The step in which a rank is killed; None if the run ends before."""
    every, steps = plan.job.checkpoint.every, plan.job.steps
    assert steps is not None and every != "auto"
    # After a checkpoint, so that something is there to resume from, and not right after
    # it, so that some steps are really lost.
    fatal = max(every, int(0.4 * steps) // every * every) + every // 3
    return fatal if fatal < steps else None


def _train(
    plan: TrainPlan,
    run_dir: Path,
    say: Callable[[str], None],
    training: Callable[[], AbstractContextManager[Watch]],
    fatal: int | None,
) -> TrainReport:
    losses: dict[int, float] = {}

    def seen(watch: Watch) -> Watch:
        def see(event: dict[str, Any]) -> None:
            if event["kind"] == "step":
                losses[event["step"]] = event["loss"]
            watch(event)

        return see

    def kill(supervisor: Supervisor, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == fatal:
            os.kill(supervisor.processes[-1].pid, signal.SIGKILL)

    try:
        with training() as watch:
            report = execute(plan, run_dir, watch=seen(watch), inject=kill)
        say(f"   {curve(list(losses.values()))}")
        return report
    except RankError as error:
        if fatal is None:
            raise
        say(f"   {curve(list(losses.values()))}")
        say(f"   lost: {error}")
    say("4. Resume from the last checkpoint  (shoal train --resume)")
    with training() as watch:
        report = execute(plan, run_dir, resume=True, watch=seen(watch))
    say(f"   {curve(list(losses.values()))}")
    return report


def curve(losses: Sequence[float], width: int = 48) -> str:
    """A training curve in one line: bars of the mean loss of equal spans of steps."""
    if not losses:
        return "loss: no step was made"
    count = min(width, len(losses))
    edges = [len(losses) * place // count for place in range(count + 1)]
    means = [sum(losses[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    drawn = "".join(bars[round((mean - low) * scale)] for mean in means)
    return f"loss {losses[0]:.2f} {drawn} {losses[-1]:.2f}"
