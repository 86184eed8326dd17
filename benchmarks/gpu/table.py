"""What was measured on a GPU, as one Markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.frame import STAGES, read

# The quantity of a row is the first of these that was predicted, with its unit.
_UNITS = {"seconds": "s", "flops": "FLOP/s", "failed": "failed"}


def table(out: Path) -> str:
    """Predicted beside measured, and others beside us: a line a row, and the machine above."""
    lines = []
    stamps = []
    for stage in STAGES:
        for name, row in read(out, stage).items():
            stamps += [row["stamp"]] if "stamp" in row else []
            lines.append("| " + " | ".join((stage, name, *cells(row))) + " |")
    if not lines:
        return "Nothing is measured.\n"
    machine = stamps[-1] if stamps else {}
    known = [str(machine[key]) for key in ("device", "driver", "torch", "date") if key in machine]
    head = ["| Stage | What | Predicted | Measured | Error | Time of others over ours | More |"]
    notes = [machine["note"], ""] if "note" in machine else []
    return "\n".join([", ".join(known), "", *notes, *head, "|---" * 7 + "|", *lines, ""])


def cells(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Predicted, measured, error, others and more of one row."""
    predicted, measured = row.get("predicted", {}), row.get("measured", {})
    key = next((name for name in _UNITS if name in predicted), "")
    for word in ("error", "skipped"):
        if word in row:
            text = " ".join(f"{word}: {row[word]}".replace("|", "\\|").split())
            return quantity(key, predicted), text, "", "", ""
    if not measured:
        return quantity(key, predicted), "interrupted", "", "", ""
    error = ""
    if predicted.get(key) and key in measured:
        error = f"{100 * (measured[key] / predicted[key] - 1):+.0f} %"
    beside = ", ".join(
        f"{name} {one['value']:.2f}x ({one['low']:.2f} to {one['high']:.2f})"
        for name, one in measured.get("beside", {}).items()
    )
    shares = {"mfu": "MFU", "share_of_limit": "of the limit"}
    more = [f"{100 * measured[k]:.0f} % {word}" for k, word in shares.items() if k in measured]
    if "tokens_per_s" in measured:
        more.append(f"{measured['tokens_per_s']:,.0f} tokens/s")
    more += [str(measured["what"])] if "what" in measured else []
    return quantity(key, predicted), quantity(key, measured), error, beside, "; ".join(more)


def quantity(key: str, values: Mapping[str, Any]) -> str:
    """A number with its unit; seconds in the unit that people read."""
    value = values.get(key)
    if value is None:
        return ""
    if key != "seconds":
        return f"{value:.4g} {_UNITS[key]}"
    scales = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit = next((name for name, scale in scales.items() if abs(value) * scale >= 1), "us")
    return f"{value * scales[unit]:.4g} {unit}"
