"""What the stages share: a file a stage, a row a case, and calls that go on where one stopped.

A row is written before its case is measured, with Shoal's prediction alone, and again with what
was measured, or with the error. A row that has neither was interrupted; it is begun once more.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import MachineError
from shoal.core.files import write_json

ROOT = Path(__file__).parents[2]
OUT = ROOT / "results" / "gpu"
# In this order: what is short and says most comes first. The probe is last, as its table would
# change the predictions of the others.
STAGES = ("suite", "products", "pointwise", "decode", "training", "checkpoint", "offload", "probe")
DONE, FAILED, USAGE, LATER, AGAIN = 0, 1, 2, 3, 75
# Calls that may begin a case.
_ATTEMPTS = 2
Row = dict[str, Any]


class NotHereError(Exception):
    """A case that cannot be measured here, and is no failure: what is missing."""


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        name: of the row.
        seconds: that it takes at most, on a GPU.
        predict: what Shoal says before: ``{"seconds": ...}``, or another quantity.
        measure: the same quantity, and whatever else is known.
    """

    name: str
    seconds: float
    predict: Callable[[], Mapping[str, Any]]
    measure: Callable[[], Mapping[str, Any]]


def read(out: Path, stage: str) -> dict[str, Row]:
    """Rows of a stage by name; none where it has no file.

    Raises:
        MachineError: the file is damaged.
    """
    path = out / f"{stage}.json"
    try:
        rows: dict[str, Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as cause:
        raise MachineError(f"{path}: no rows of scripts/gpu ({cause}); move it away") from cause
    return rows


def write(out: Path, stage: str, rows: Mapping[str, Row]) -> None:
    """Write the rows of a stage, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    stamps = [row["stamp"] for row in rows.values() if "stamp" in row]
    machine = {"gpu": stamps[-1]["device"]} if stamps else {}
    write_json(out / f"{stage}.json", {"stage": stage, "machine": machine, "rows": rows})


def put(out: Path, stage: str, name: str, row: Row) -> None:
    """Write a row; the others of the stage stay."""
    write(out, stage, {**read(out, stage), name: row})


def forget(out: Path, stage: str, *, everything: bool) -> None:
    """Leave rows out that failed or were skipped, or all of them, so that they are made again."""
    rows = read(out, stage)
    kept = {} if everything else {name: row for name, row in rows.items() if "measured" in row}
    if kept != rows:
        write(out, stage, kept)


def ended(row: Row) -> bool:
    """Whether a row is measured, has failed, or cannot be."""
    return any(key in row for key in ("measured", "error", "skipped"))


def run_stage(
    stage: str, out: Path, deadline: float, place: Any, say: Callable[[str], None] = print
) -> int:
    """Measure what is left of a stage in this process.

    Raises:
        MachineError: there are rows of another device, driver or version of torch.

    Returns:
        DONE, LATER where a case needs more time than is left, or AGAIN behind a failed case: what
        a GPU computes after an error may be wrong, so the rest wants a new process.
    """
    status = DONE
    for name, row in read(out, stage).items():
        other = [k for k in ("device", "driver", "torch")
                 if "stamp" in row and row["stamp"].get(k) != place.stamp.get(k)]  # fmt: skip
        if other:
            raise MachineError(
                f"{out / stage}.json: {name} was measured elsewhere ({', '.join(other)} differs); "
                "give another --out, or move it away"
            )
    for case in importlib.import_module(f"gpu.{stage}").cases(place):
        row = read(out, stage).get(case.name, {})
        if ended(row):
            continue
        left = deadline - time.monotonic()
        tries = row.get("attempts", 0) + 1
        if tries <= _ATTEMPTS and left < case.seconds:
            say(
                f"[{left:4.0f} s left] {stage}: {case.name} takes up to {case.seconds:.0f} s: later"
            )
            status = LATER
            continue
        row = {"attempts": tries, "stamp": place.stamp}
        try:
            if tries > _ATTEMPTS:
                raise TimeoutError(f"{_ATTEMPTS} calls ended before it did")
            row["predicted"] = dict(case.predict())
            put(out, stage, case.name, row)
            say(f"[{left:4.0f} s left] {stage}: {case.name}: predicted {short(row['predicted'])}")
            row["measured"] = dict(case.measure())
            say(f"    measured {short(row['measured'])}")
        except NotHereError as reason:
            row["skipped"] = str(reason)
        except Exception as cause:
            row["error"] = f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
            status = AGAIN
        put(out, stage, case.name, row)
        place.free()
        for kind in ("skipped", "error"):
            if kind in row:
                say(f"    {case.name}: {kind}: {row[kind]}")
        if status == AGAIN:
            return AGAIN
    return status


def failures(out: Path, stages: Iterator[str] | tuple[str, ...] = STAGES) -> list[str]:
    """Stage and case of every row with an error."""
    return [f"{s}: {name}" for s in stages for name, row in read(out, s).items() if "error" in row]


def short(values: Mapping[str, Any]) -> str:
    """The numbers of a row in one line."""
    kept = {k: v for k, v in values.items() if isinstance(v, int | float | str) and k != "note"}
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in kept.items()
    )
