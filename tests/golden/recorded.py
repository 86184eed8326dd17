"""Golden outputs: what the package printed, learned and served when they were last recorded.

A change of structure keeps them. One that is meant to change them records them anew
(``scripts/golden``), and the commit says why, row by row.

A file holds ``{"recorded_on": CPU, "rows": {name: value}}``. Floating-point numbers are written
in full or as ``float.hex``. ``SHOAL_GOLDEN=bits`` compares bits, on the machine of the recording:
the gate of a refactoring. Otherwise a number may differ by a tolerance, as compilers and libraries
choose instructions and orders of summation by more of a CPU than it says of itself.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.core.files import write_atomic

HERE = Path(__file__).parent


def cpu() -> str:
    """Kind of CPU, and how wide its vectors are: much of what decides the order of sums."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    rows = {key.strip(): value.strip() for key, _, value in lines}
    wide = sorted(
        set(rows.get("flags", "").split()) & {"avx2", "avx512f", "avx512_bf16", "amx_tile"}
    )
    kind = [rows.get(key, "") for key in ("model name", "cpu family", "model", "stepping")]
    return " ".join([*kind, *wide])


def differences(expected: Any, actual: Any, *, tolerance: float, where: str = "") -> list[str]:
    """Where two values differ, with both; empty if they are the same.

    Args:
        expected: of the file.
        actual: of today.
        tolerance: relative, of floating-point numbers; 0 asks for the same bits.
        where: path so far.
    """
    if isinstance(expected, dict) and isinstance(actual, dict):
        rows = []
        for key in sorted(expected.keys() | actual.keys()):
            path = f"{where}.{key}" if where else key
            if key not in expected or key not in actual:
                # A value that says nothing is no difference: fields come and go.
                if expected.get(key) or actual.get(key):
                    rows.append(f"{path}: only {'today' if key in actual else 'in the file'}")
            else:
                rows += differences(expected[key], actual[key], tolerance=tolerance, where=path)
        return rows
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return [
            row
            for i, (a, b) in enumerate(zip(expected, actual, strict=True))
            for row in differences(a, b, tolerance=tolerance, where=f"{where}[{i}]")
        ]
    if expected == actual:
        return []
    a, b = _number(expected), _number(actual)
    if a is None or b is None:
        return [f"{where}: recorded {expected!r}, today {actual!r}"]
    return (
        [] if math.isclose(a, b, rel_tol=tolerance) else [f"{where}: recorded {a!r}, today {b!r}"]
    )


def _number(value: Any) -> float | None:
    if isinstance(value, float):
        return value
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return float.fromhex(value)
    return None


def settle(
    name: str,
    row: str,
    actual: Any,
    *,
    tolerance: float,
    anywhere: bool = True,
    bits: Collection[str] = (),
) -> None:
    """Compare one row of ``NAME.json`` with today's value; record it where that was asked for.

    Args:
        name: of the file.
        row: of the file.
        actual: what JSON can hold.
        tolerance: relative, of floating-point numbers where bits are not asked for.
        anywhere: False for what follows from the last bits of numbers, such as the better one of
            two tokens in fp32: another kind of CPU skips it.
        bits: keys of a row that is a dictionary, such as digests, which say something where bits
            are compared and are left out elsewhere.
    """
    actual = json.loads(json.dumps(actual))
    path = HERE / f"{name}.json"
    if os.environ.get("SHOAL_GOLDEN_RECORD") == "1":
        rows = json.loads(path.read_text())["rows"] if path.exists() else {}
        _write(path, {**rows, row: actual})
        return
    stored = json.loads(path.read_text())
    assert row in stored["rows"], f"{row}: not recorded; run scripts/golden {name}"
    expected, allowed = stored["rows"][row], 0.0
    if not anywhere and stored["recorded_on"] != cpu():
        pytest.skip(f"recorded on {stored['recorded_on']}, and this is {cpu()}")
    if os.environ.get("SHOAL_GOLDEN") != "bits":
        allowed = tolerance
        for side in (expected, actual):
            for key in bits:
                side.pop(key, None)
    result = differences(expected, actual, tolerance=allowed)
    assert not result, "\n".join([f"{len(result)} differences of {name}: {row}", *result[:20]])


def _write(path: Path, rows: Mapping[str, Any]) -> None:
    """A line for each row, so that a change of one is a line of a diff."""
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(rows[key], sort_keys=True, separators=(',', ':'))}"
        for key in sorted(rows)
    )
    write_atomic(path, f'{{"recorded_on": {json.dumps(cpu())},\n"rows": {{\n{lines}\n}}}}\n')
