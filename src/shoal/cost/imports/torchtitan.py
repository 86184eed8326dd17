"""Logs of torchtitan: the line of each logged step.

Source: the console metrics of torchtitan 0.1 to 0.3.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.parts import part
from shoal.cost.imports.log import (
    GIB,
    Log,
    LogEntry,
    head,
    is_last,
    lines,
    number,
    paced,
    refuse,
    stamp,
)

_LINE = re.compile(r"(?<!validate )\bstep:\s*(\d+)\s+loss:\s*(\S+)")
# Name in the line -> quantity and the factor to plain units.
_FIELDS = {
    "tps": ("device_tokens_per_s", 1.0),
    "tflops": ("device_flops", 1e12),
    "mfu": ("mfu", 0.01),
}
_MEMORY = re.compile(r"\bmemory:\s*([^\sG]+)GiB")
SAMPLE = "step: 10  loss: 7.1  memory: 42.00GiB(44.30%)  tps: 5,762  tflops: 330.10  mfu: 33.40%"


@part
class TorchtitanLog:
    """``step: 10 loss: ... memory: ... tps: ...``, with tokens per second of one device."""

    def sniff(self, path: Path) -> int:
        return sum(bool(_LINE.search(line) and "tps:" in line) for line in head(path))

    def read(self, path: Path) -> Log:
        entries, times = [], []
        for place, line in lines(path):
            match = _LINE.search(line)
            if match is None:
                continue
            if "tps:" not in line and is_last(path, place):
                break  # cut off in the middle of the last line
            values = {"loss": number(match[2], path, place, "loss")}
            for name, (quantity, factor) in _FIELDS.items():
                result = re.search(rf"\b{name}:\s*(\S+)", line)
                if result and result[1] != "N/A":
                    values[quantity] = factor * number(result[1], path, place, name)
            memory = _MEMORY.search(line)
            if memory:
                values["memory_bytes"] = GIB * number(memory[1], path, place, "memory")
            entries.append(LogEntry(int(match[1]), place, values))
            times.append(stamp(line))
        if not entries:
            raise refuse(path, "torchtitan", SAMPLE)
        return Log("torchtitan", path, "train", paced(entries, times))
