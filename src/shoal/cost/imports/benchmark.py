"""The summary that serving benchmarks of vLLM and SGLang print, and the JSON they save."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.cost.imports.log import number

# Words of the summary -> quantity and the factor to plain units.
WORDS = {
    "Output token throughput (tok/s)": ("tokens_per_s", 1.0),
    "Request throughput (req/s)": ("requests_per_s", 1.0),
    "Median TTFT (ms)": ("ttft_p50_s", 1e-3),
    "P95 TTFT (ms)": ("ttft_p95_s", 1e-3),
    "Median TPOT (ms)": ("tpot_p50_s", 1e-3),
    "P95 TPOT (ms)": ("tpot_p95_s", 1e-3),
    "Benchmark duration (s)": ("total_s", 1.0),
}
KEYS = {
    "output_throughput": ("tokens_per_s", 1.0),
    "request_throughput": ("requests_per_s", 1.0),
    "median_ttft_ms": ("ttft_p50_s", 1e-3),
    "p95_ttft_ms": ("ttft_p95_s", 1e-3),
    "median_tpot_ms": ("tpot_p50_s", 1e-3),
    "p95_tpot_ms": ("tpot_p95_s", 1e-3),
    "duration": ("total_s", 1.0),
}
_ROW = re.compile(r"^\s*([A-Z][\w /()]+?\)):\s+(\S+)\s*$")


def has_summary(line: str) -> bool:
    """Whether the line is one of a summary."""
    match = _ROW.match(line)
    return bool(match and match[1] in WORDS)


def summary(line: str, path: Path, place: int) -> dict[str, float]:
    """The quantity of a line of a summary; nothing for another line."""
    match = _ROW.match(line)
    if match is None or match[1] not in WORDS:
        return {}
    quantity, factor = WORDS[match[1]]
    return {quantity: factor * number(match[2], path, place, match[1])}


def saved(path: Path) -> dict[str, float]:
    """The quantities of a saved result; of JSON lines the last one.

    Raises:
        DataError: it is no such JSON; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); give a saved result") from cause
    raw: Any = None
    place = 1
    try:
        raw = json.loads(text)
    except ValueError:
        for place, line in enumerate(text.splitlines(), 1):
            try:
                raw = json.loads(line)
            except ValueError as cause:
                raise DataError(
                    f"{path}, line {place}: {line[:80]!r}: not JSON; give the result that the "
                    "benchmark saved"
                ) from cause
    result = {
        quantity: factor * number(str(raw[key]), path, place, key)
        for key, (quantity, factor) in KEYS.items()
        if isinstance(raw, dict) and raw.get(key) is not None
    }
    if not result:
        raise DataError(
            f"{path}, line {place}: none of {', '.join(KEYS)}; give the result that the benchmark "
            "saved"
        )
    return result
