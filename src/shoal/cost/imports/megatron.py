"""Logs of Megatron-LM: the line of each logged iteration.

Source: the training log of Megatron-LM and its descendants.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.cost.imports.log import Log, LogEntry, head, is_last, lines, number, refuse

_LINE = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_MEMORY = re.compile(r"memory \(MB\).*?\bmax reserved:\s*([0-9.]+)")
# Newer ones print the mean since the start behind a slash.
_PACE = re.compile(r"elapsed time per iteration \(ms\):\s*([^\s|/]+)")
_FLOPS = re.compile(r"(?:throughput per GPU \(TFLOP/s/GPU\)|TFLOPs):\s*([^\s|]+)")
_LOSS = re.compile(r"\|\s*(?:lm )?loss:\s*([^\s|]+)")
_BATCH = re.compile(r"glo?b[al]+ batch size:\s*([^\s|]+)")
SAMPLE = " iteration 10/ 100 | consumed samples: 2560 | elapsed time per iteration (ms): 1234.5 |"


@part
class MegatronLog:
    """``iteration 10/100 | ... | elapsed time per iteration (ms): ...``.

    The memory line, printed once, applies to the whole run.
    """

    def sniff(self, path: Path) -> int:
        return sum(bool(_LINE.search(line) and _PACE.search(line)) for line in head(path))

    def read(self, path: Path) -> Log:
        entries: list[LogEntry] = []
        facts: dict[str, tuple[float, int]] = {}
        totals: dict[str, float] = {}
        for place, line in lines(path):
            memory = _MEMORY.search(line)
            if memory:
                held = 2**20 * number(memory[1], path, place, "max reserved")
                totals["memory_bytes"] = max(held, totals.get("memory_bytes", 0.0))
            match = _LINE.search(line)
            if match is None:
                continue
            pace = _PACE.search(line)
            if pace is None:
                if is_last(path, place):
                    break
                raise _without_pace(path, place, line)
            values = {"step_s": 1e-3 * number(pace[1], path, place, "elapsed time per iteration")}
            flops, loss, batch = _FLOPS.search(line), _LOSS.search(line), _BATCH.search(line)
            if flops:
                values["device_flops"] = 1e12 * number(flops[1], path, place, "TFLOP/s")
            if loss:
                values["loss"] = number(loss[1], path, place, "lm loss")
            if batch:
                facts["global_batch"] = (number(batch[1], path, place, "global batch size"), place)
            entries.append(LogEntry(int(match[1]), place, values))
        if not entries:
            raise refuse(path, "megatron", SAMPLE)
        return Log("megatron", path, "train", tuple(entries), totals, facts)


def _without_pace(path: Path, place: int, line: str) -> DataError:
    """The error of a line that begins as it should and has no pace."""
    return DataError(
        f"{path}, line {place}: {line.strip()[:80]!r}: an iteration without its elapsed time; "
        f"expected a line such as {SAMPLE!r}; remove the line, or give the complete log"
    )
