"""``results/<claim>.json``: everything needed to recompute a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from shoal.claims import CLAIMS
from shoal.claims.judge import judge
from shoal.claims.protocols import Attempt, ClaimSamples, Metric, Verdict
from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, StoreError, UnknownPartError
from shoal.core.files import write_json

MAX_BYTES = 256 * 2**20


class ClaimRecord(Value):
    """One run of a claim.

    Args:
        format: version of this file's form.
        claim: name of the experiment.
        rows: catalogue rows it is about.
        options: the experiment's options that differ from its defaults.
        quick: a quick run, which judges only the quick metrics.
        command: how to run it again.
        commit: the code's commit; empty outside a checkout.
        dirty: the checkout had changes.
        code: digest of the code that the claim depends on (``dependencies.py``).
        started: time of the start, UTC.
        seconds: s the run took, A/A run included.
        seed: seed of the run and of the bootstrap.
        data: the user's own data, if any.
        model: the user's own model, if any.
        metrics: what was claimed then.
        attempts: what had been tried.
        samples: what the run saw.
        aa: what the run with the part replaced by its baseline saw.
        fingerprint: the machine.
        versions: package -> version.
        verdict: what follows from all this.
        digest: sha256 of everything else in this file.
    """

    format: Literal[1] = 1
    claim: str
    rows: tuple[int, ...]
    options: dict[str, JsonValue] = {}
    quick: bool = False
    command: str
    commit: str = ""
    dirty: bool = False
    code: str = ""
    started: str
    seconds: float
    seed: int
    data: str | None = None
    model: str | None = None
    metrics: tuple[Metric, ...]
    attempts: tuple[Attempt, ...] = ()
    samples: ClaimSamples
    aa: ClaimSamples | None = None
    fingerprint: dict[str, str] = {}
    versions: dict[str, str] = {}
    verdict: Verdict
    digest: str = ""


class RecordFault(Value):
    """Why a results file cannot be believed.

    Args:
        kind: ``edited``: its verdict does not follow from its samples, or its digest is
            not its own; ``dirty``: it was made by code that no commit has; ``outdated``: its
            thresholds are no longer the claim's; ``unreadable``: it is no results file of this
            version.
        text: what is wrong and what to do.
    """

    kind: Literal["edited", "dirty", "outdated", "unreadable"]
    text: str


def digest_of(record: ClaimRecord) -> str:
    """sha256 of the record without its digest."""
    return _digest(record.model_dump(mode="json"))


def _digest(raw: dict[str, Any]) -> str:
    rest = {name: value for name, value in raw.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(record: ClaimRecord) -> ClaimRecord:
    """The record with its digest."""
    return record.model_copy(update={"digest": digest_of(record)})


def verdict_of(record: ClaimRecord) -> Verdict:
    """The verdict, computed again from the record's samples and thresholds."""
    if record.verdict.status == "skipped" and not record.samples.metrics:
        return record.verdict  # nothing was measured: there is only the reason
    return judge(
        record.metrics,
        record.samples,
        aa=record.aa,
        quick=record.quick,
        seed=record.seed,
        attempts=record.attempts,
    )


def write(record: ClaimRecord, path: Path) -> None:
    """Write a sealed record.

    Raises:
        StoreError: the file system refuses.
    """
    write_json(path, record.model_dump(mode="json"), error=StoreError)


def read(path: Path) -> ClaimRecord:
    """Read a record without judging it.

    Raises:
        StoreError: the file cannot be read or is no record.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StoreError(f"{path}: larger than {MAX_BYTES} bytes; that is no results file")
        raw = json.loads(path.read_text(encoding="utf-8"))
        return parse(ClaimRecord, raw, where=str(path))
    except OSError as cause:
        raise StoreError(f"{path}: cannot be read ({cause.strerror})") from cause
    except ValueError as cause:
        raise StoreError(f"{path}: not JSON ({cause}); run the claim again") from cause
    except ConfigError as cause:
        raise StoreError(f"{cause}; run the claim again") from cause


def recheck(path: Path, metrics: Sequence[Metric] | None = None) -> ClaimRecord:
    """Read a record and compute its verdict again.

    Args:
        path: a results file.
        metrics: what is claimed now, which must be what the file's verdict is about; that of
            the experiment that the file names if not given.

    Returns:
        Record: with the recomputed verdict.

    Raises:
        StoreError: the file was edited, its verdict does not follow from its samples, or
            its thresholds are not those of the claim.
        UnknownPartError: there is no such experiment.
    """
    result = _inspected(path, read(path), metrics)
    if isinstance(result, RecordFault):
        raise StoreError(f"{path}: {result.text}")
    return result


def judge_again(path: Path) -> ClaimRecord:
    """Judge the samples of a record by the thresholds and by the judge of today, and write it.

    Args:
        path: a results file.

    Returns:
        Record: with its new verdict.

    Raises:
        StoreError: the file was edited, or its samples are not those that are claimed now.
        UnknownPartError: there is no such experiment.
    """
    record = read(path)
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("digest") != _digest(raw):
        raise StoreError(f"{path}: was edited after it was written; run the claim again")
    claim = CLAIMS.load(record.claim, where=f"{path}: claim")
    now = {"metrics": tuple(claim.metrics), "attempts": tuple(claim.attempts)}
    record = record.model_copy(update=now)
    try:
        record = sealed(record.model_copy(update={"verdict": verdict_of(record)}))
    except ConfigError as cause:
        raise StoreError(f"{path}: {cause}; run the claim again") from cause
    write(record, path)
    return record


def inspect(path: Path, metrics: Sequence[Metric] | None = None) -> ClaimRecord | RecordFault:
    """Read a record and compute its verdict again, or say why it cannot be believed.

    The same judgement as :func:`recheck`, for pages that go on past a bad file.

    Args:
        path: a results file.
        metrics: what is claimed now; see :func:`recheck`.
    """
    try:
        return _inspected(path, read(path), metrics)
    except StoreError as cause:
        return RecordFault(kind="unreadable", text=str(cause).removeprefix(f"{path}: "))
    except UnknownPartError as cause:
        return RecordFault(kind="outdated", text=str(cause))


def _inspected(
    path: Path, record: ClaimRecord, metrics: Sequence[Metric] | None
) -> ClaimRecord | RecordFault:
    try:
        verdict = verdict_of(record)
    except ConfigError as cause:
        return RecordFault(kind="edited", text=f"{cause}; run the claim again")
    if not _same(verdict.model_dump(), record.verdict.model_dump()):
        return RecordFault(
            kind="edited",
            text=f"its verdict {record.verdict.status!r} does not follow from its samples, "
            f"which give {verdict.status!r}; run the claim again",
        )
    if record.digest != digest_of(record):
        return RecordFault(
            kind="edited", text="was edited after it was written; run the claim again"
        )
    if record.dirty:
        return RecordFault(
            kind="dirty",
            text=f"was made by code with changes beside commit {record.commit[:12]}; commit them "
            "and run the claim again",
        )
    if metrics is None:
        metrics = CLAIMS.load(record.claim, where=f"{path}: claim").metrics
    if record.metrics != tuple(metrics):
        return RecordFault(
            kind="outdated",
            text=f"its thresholds are not those of the claim {record.claim!r} any more; "
            "judge it again (shoal claims judge), or run it again",
        )
    return record.model_copy(update={"verdict": verdict})


def _same(a: Any, b: Any) -> bool:
    """Equal but for the last digits, which may differ between versions of NumPy."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return bool(a == b)
