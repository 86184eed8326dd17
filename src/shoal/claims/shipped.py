"""Verdicts that travel with the package, and where a clone has the results themselves.

A wheel has the verdict of each claim without its raw samples, as ``verdicts.json``, made from
``results/`` when the wheel is built. A clone has no such file.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from shoal.claims.record import ClaimRecord
from shoal.core.config import parse
from shoal.core.errors import StoreError
from shoal.core.version import PACKAGE

FILE = Path(__file__).with_name("verdicts.json")


def results_directory() -> Path:
    """``results`` of the working directory, or of the clone that this code runs from."""
    here, clone = Path("results"), PACKAGE.parents[1]
    if here.is_dir() or not (clone / "pyproject.toml").is_file():
        return here
    return clone / "results"


@functools.cache
def shipped_records() -> dict[str, ClaimRecord]:
    """Claim -> its record without samples; empty in a clone.

    Raises:
        StoreError: the installed file is damaged.
    """
    if not FILE.is_file():
        return {}
    try:
        raw = json.loads(FILE.read_text(encoding="utf-8"))["records"]
        records = [parse(ClaimRecord, one, where=str(FILE)) for one in raw]
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise StoreError(f"{FILE}: damaged ({cause}); install shoal-ml again") from cause
    return {record.claim: record for record in records}
