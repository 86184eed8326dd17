"""Logs of DeepSpeed: the line of its throughput timer.

Source: ``ThroughputTimer`` and ``log_dist`` of DeepSpeed.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.parts import part
from shoal.cost.imports.log import GIB, Log, LogEntry, head, is_last, lines, number, refuse

_LINE = re.compile(r"(?:global_step=|\b\d+/)(\d+), RunningAvgSamplesPerSec=([^,\s]+)")
_NOW = re.compile(r"CurrSamplesPerSec=([^,\s]+)")
_MEMORY = re.compile(r"MaxMemAllocated=([0-9.]+)GB")
_LOSS = re.compile(r"\b(?:lm )?loss[:=]\s*([0-9.eE+-]+)", re.IGNORECASE)
SAMPLE = "epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=25.03, Curr..."


@part
class DeepSpeedLog:
    """``global_step=10, RunningAvgSamplesPerSec=..., CurrSamplesPerSec=..., MaxMemAllocated=...``.

    Samples per second are of all ranks. If the training script prints losses between two such
    lines, the last one is used.
    """

    def sniff(self, path: Path) -> int:
        return sum(bool(_LINE.search(line)) for line in head(path))

    def read(self, path: Path) -> Log:
        entries: list[LogEntry] = []
        loss: float | None = None
        for place, line in lines(path):
            match = _LINE.search(line)
            if match is None:
                said = _LOSS.search(line)
                if said:
                    loss = number(said[1], path, place, "loss")
                continue
            now = _NOW.search(line)
            if now is None and is_last(path, place):
                break
            text = match[2] if now is None else now[1]
            values = {"samples_per_s": number(text, path, place, "SamplesPerSec")}
            memory = _MEMORY.search(line)
            if memory:
                values["memory_bytes"] = GIB * number(memory[1], path, place, "MaxMemAllocated")
            if loss is not None:
                values["loss"] = loss
            entries.append(LogEntry(int(match[1]), place, values))
        if not entries:
            raise refuse(path, "deepspeed", SAMPLE)
        return Log("deepspeed", path, "train", tuple(entries))
