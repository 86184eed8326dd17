"""Puts the verdicts of ``results/`` into the wheel, without their raw samples.

Only the standard library and hatchling are there while a wheel is built.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOST_BYTES = 2**20


def compact(results: Path) -> str:
    """Every record of a directory that a commit's code has made, in the order of their names.

    Samples, the A/A run's and those beside peers, and other details stay in the repository.

    Raises:
        ValueError: it is more than the wheel may carry.
    """
    records = []
    for path in sorted(results.glob("*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or not {"claim", "verdict", "samples"} <= raw.keys():
            continue  # results of something else
        if raw["dirty"] or raw["digest"] != _digest(raw):
            print(f"left out of the wheel: {path} was edited, or made by code without a commit")
            continue
        kept = {name: value for name, value in raw.items() if name not in ("aa", "digest")}
        kept["samples"] = {name: raw["samples"][name] for name in ("bounds", "skipped", "profile")}
        records.append(kept)
    text = json.dumps({"format": 1, "records": records}, separators=(",", ":"), ensure_ascii=False)
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"{results}: {len(text)} bytes of verdicts; a wheel has {MOST_BYTES}")
    return text


def _digest(raw: dict[str, Any]) -> str:
    """The digest of a record, as :mod:`shoal.claims.record` makes it."""
    rest = {name: value for name, value in raw.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class VerdictsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds ``shoal/claims/verdicts.json`` to a wheel; a clone reads its own ``results/``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the file and name it; called before a build."""
        results = Path(self.root) / "results"
        if version == "editable" or not results.is_dir():
            return
        self._made = tempfile.TemporaryDirectory(prefix="shoal-verdicts-")
        file = Path(self._made.name) / "verdicts.json"
        file.write_text(compact(results), encoding="utf-8")
        build_data["force_include"][str(file)] = "shoal/claims/verdicts.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove it; called after a build."""
        if hasattr(self, "_made"):
            self._made.cleanup()
