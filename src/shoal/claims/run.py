"""Running a claim: the experiment, its A/A run, the verdict, the results file."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.claims import CLAIMS
from shoal.claims.dependencies import code_digest
from shoal.claims.judge import judge, wanted
from shoal.claims.protocols import ClaimSamples, Experiment, ExperimentContext, Verdict
from shoal.claims.record import ClaimRecord, recheck, sealed, write
from shoal.core.files import shoal_home
from shoal.core.measure import check_quiet
from shoal.core.parts import Choice
from shoal.core.scratch import scratch_directory
from shoal.core.version import PACKAGE
from shoal.ir import Machine

RESULTS = Path("results")

Progress = Callable[[str, float], None]


def _silent(message: str, done: float) -> None:
    """Discard progress."""


@dataclass(frozen=True)
class Result:
    """What running a claim gave.

    Args:
        record: the whole record, verdict included.
        path: where it was written; None for a quick run.
        disagrees: quick metrics that hold where the full run on file misses, or the reverse.
    """

    record: ClaimRecord
    path: Path | None = None
    disagrees: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        return self.record.verdict


def run(
    name: str,
    *,
    quick: bool = False,
    data: Path | None = None,
    model: str | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    results: Path = RESULTS,
    progress: Progress = _silent,
    wait_quiet_s: float = 60.0,
) -> Result:
    """Run a claim and judge it.

    A full run is written to ``results/<claim>.json``. A quick run writes nothing; it is
    compared with the full run on file.

    Args:
        name: a part of kind ``claim``.
        quick: at most 10 s, counts only.
        data: the user's own data.
        model: the user's own model.
        seed: random seed.
        options: options of the experiment.
        results: directory of the results files.
        progress: called with (what is being done, share done).
        wait_quiet_s: s to wait for a busy machine before a timing is refused.

    Raises:
        UnknownPartError: there is no such claim.
        NoisyMachineError: a timing would be judged on a busy machine.
        StoreError: the results file cannot be written, or the one on file was edited.
    """
    choice = Choice(name=name, options=dict(options or {}))
    experiment: Experiment = CLAIMS.build(choice)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    samples, aa, verdict = _collect(
        experiment,
        ExperimentContext(
            work_dir=Path(),
            machine=_machine(),
            data=data,
            model=model,
            seed=seed,
            progress=progress,
            kept=shoal_home() / "claims" / f"{name}.json",
        ),
        quick=quick,
        wait_quiet_s=wait_quiet_s,
    )
    from shoal.machine.fingerprint import fingerprint, versions

    commit, dirty = commit_of_code()
    record = sealed(
        ClaimRecord(
            claim=name,
            rows=tuple(experiment.rows),
            options=dict(choice.options),
            quick=quick,
            command=_command(name, quick, data, model, seed, choice.options),
            commit=commit,
            dirty=dirty,
            code=code_digest(CLAIMS[name]),
            started=started,
            seconds=round(time.monotonic() - begin, 3),
            seed=seed,
            data=None if data is None else str(data),
            model=model,
            metrics=tuple(experiment.metrics),
            attempts=tuple(experiment.attempts),
            samples=samples,
            aa=aa,
            fingerprint=fingerprint(),
            versions=versions(),
            verdict=verdict,
        )
    )
    path = results / f"{name}.json"
    if quick:
        return Result(record, None, _disagreements(record, path))
    write(record, path)
    return Result(record, path)


def _collect(
    experiment: Experiment, context: ExperimentContext, *, quick: bool, wait_quiet_s: float
) -> tuple[ClaimSamples, ClaimSamples | None, Verdict]:
    """Samples of the claim and of its A/A run, and the verdict."""
    reason = experiment.refuses(context)
    if reason:
        return ClaimSamples(), None, Verdict(status="skipped", reason=reason)
    if any(metric.timing for metric in wanted(experiment.metrics, quick)):
        context.progress("waiting for a quiet machine", 0.0)
        check_quiet(wait_s=wait_quiet_s)
    report = context.progress
    with scratch_directory("claim") as directory:
        main = replace(
            context,
            work_dir=_made(directory / "claim"),
            progress=lambda text, done: report(text, done / 2),
        )
        samples = experiment.run(main, quick=quick)
        aa = None
        if samples.metrics:
            replaced = replace(
                main,
                work_dir=_made(directory / "baseline"),
                progress=lambda text, done: report(f"A/A: {text}", 0.5 + done / 2),
            )
            aa = experiment.run(replaced, quick=quick, as_baseline=True)
    verdict = judge(
        experiment.metrics,
        samples,
        aa=aa,
        quick=quick,
        seed=context.seed,
        attempts=experiment.attempts,
    )
    return samples, aa, verdict


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _machine() -> Machine | None:
    path = shoal_home() / "machine.yaml"
    return Machine.load(path) if path.exists() else None


_CONTRADICTION = {"works", "falls_short"}


def _disagreements(quick: ClaimRecord, path: Path) -> tuple[str, ...]:
    if not path.exists():
        return ()
    full = {metric.name: metric for metric in recheck(path, quick.metrics).verdict.metrics}
    return tuple(
        metric.name
        for metric in quick.verdict.metrics
        if metric.name in full and {metric.outcome, full[metric.name].outcome} == _CONTRADICTION
    )


def _command(
    name: str,
    quick: bool,
    data: Path | None,
    model: str | None,
    seed: int,
    options: Mapping[str, Any],
) -> str:
    words = ["shoal", "claims", "run", name]
    words += ["--quick"] if quick else []
    words += ["--data", str(data)] if data is not None else []
    words += ["--model", model] if model is not None else []
    words += ["--seed", str(seed)] if seed else []
    for key, value in options.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def commit_of_code() -> tuple[str, bool]:
    """Commit of the code's checkout and whether it had changes; empty without one."""
    where = PACKAGE
    try:
        # An installed package may lie inside the repository of something else.
        own = _git(where, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(where, "rev-parse", "HEAD")
        if own.returncode or commit.returncode:
            return "", False
        changed = _git(where, "status", "--porcelain", "--", ".")
    except (FileNotFoundError, subprocess.TimeoutExpired):  # no git that answers
        return "", False
    return commit.stdout.strip(), bool(changed.stdout.strip())


def _git(where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(where), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
