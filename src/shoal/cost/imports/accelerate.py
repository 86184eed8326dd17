"""Logs of training scripts on Accelerate: those of the Hugging Face trainer.

Accelerate itself logs nothing. Its trainers print a dictionary at each logged step, a
progress bar, and sums at the end; ``trainer_state.json`` holds the same dictionaries.

Source: ``Trainer.log`` and the progress callback of transformers 4 and 5.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.cost.imports.log import Log, LogEntry, head, is_last, lines, number, refuse

_DICT = re.compile(r"\{['\"][\w/]+['\"]:.*\}")
_OPEN = re.compile(r"^\s*\{['\"](?:loss|train_runtime)['\"]:")
_BAR = re.compile(r"\|\s*(\d+)/\d+ \[(?:\d+:)?\d+:\d+<[^,\]]*,\s*([0-9.]+)(s/it|it/s)")
SAMPLE = "{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}"
# Sums that it prints at the end -> quantity; of those in rates of steps the inverse.
_TOTALS = {
    "train_samples_per_second": "samples_per_s",
    "train_tokens_per_second": "tokens_per_s",
}


@part
class AccelerateLog:
    """Dictionaries with a ``loss``, the progress bar's rate, and the sums at the end."""

    def sniff(self, path: Path) -> int:
        if path.name == "trainer_state.json":
            return 1_000_000
        return sum(bool(_OPEN.search(line) or _BAR.search(line)) for line in head(path))

    def read(self, path: Path) -> Log:
        if path.suffix == ".json":
            return self._state(path)
        entries: list[LogEntry] = []
        totals: dict[str, float] = {}
        step = 0
        for place, line in lines(path):
            bar = _BAR.search(line)
            if bar:
                rate = number(bar[2], path, place, "the bar's rate")
                if rate > 0 and int(bar[1]) > step:
                    step = int(bar[1])
                    seconds = rate if bar[3] == "s/it" else 1 / rate
                    entries.append(LogEntry(step, place, {"step_s": seconds}))
            match = _DICT.search(line)
            if match is None:
                if _OPEN.search(line) and not is_last(path, place):
                    raise _broken(path, place, line)
                continue
            said = _literal(match[0], path, place)
            values, sums = _quantities(said, path, place)
            totals |= sums
            if values:
                entries.append(LogEntry(max(step, len(entries) + 1), place, values))
        if not entries and not totals:
            raise refuse(path, "accelerate", SAMPLE)
        return Log("accelerate", path, "train", tuple(entries), totals)

    def _state(self, path: Path) -> Log:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as cause:
            raise DataError(
                f"{path}: cannot be read ({cause.strerror}); give a file that exists"
            ) from cause
        except ValueError as cause:
            place = getattr(cause, "lineno", 1)
            raise DataError(f"{path}, line {place}: not JSON; give a trainer_state.json") from cause
        history = raw.get("log_history") if isinstance(raw, dict) else None
        if not isinstance(history, list) or not all(isinstance(item, dict) for item in history):
            raise DataError(
                f"{path}, line 1: no list log_history; give the trainer_state.json of a checkpoint"
            )
        entries: list[LogEntry] = []
        totals: dict[str, float] = {}
        for item in history:
            values, sums = _quantities(item, path, 1)
            totals |= sums
            if values:
                entries.append(LogEntry(int(item.get("step", len(entries) + 1)), 0, values))
        return Log("accelerate", path, "train", tuple(entries), totals)


def _broken(path: Path, place: int, line: str) -> DataError:
    return DataError(
        f"{path}, line {place}: {line.strip()[:80]!r}: a dictionary without its end; expected a "
        f"line such as {SAMPLE!r}; remove the line, or give the complete log"
    )


def _literal(text: str, path: Path, place: int) -> dict[str, Any]:
    try:
        result = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise _broken(path, place, text) from None
    return result if isinstance(result, dict) else {}


def _quantities(
    said: Mapping[str, Any], path: Path, place: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(quantities of a step, quantities of the whole run) in one dictionary."""
    values, totals = {}, {}
    if "loss" in said:
        values["loss"] = number(str(said["loss"]), path, place, "loss")
    steps = float(said.get("train_steps_per_second") or 0.0)
    if steps > 0:
        totals["step_s"] = 1 / steps
    for key, quantity in _TOTALS.items():
        if said.get(key):
            totals[quantity] = number(str(said[key]), path, place, key)
    return values, totals
