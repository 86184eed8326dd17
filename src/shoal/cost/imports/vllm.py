"""Logs of vLLM: the line its engine prints every ten seconds, and its benchmark's summary.

Source: the stat loggers of vLLM 0.6 and later; ``vllm bench serve``.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.parts import part
from shoal.cost.imports.benchmark import has_summary, saved, summary
from shoal.cost.imports.log import Log, LogEntry, head, is_last, lines, number, refuse

_PROMPT = re.compile(r"Avg prompt throughput: ([^\s,]+) tokens/s")
_OUTPUT = re.compile(r"Avg generation throughput: ([^\s,]+) tokens/s")
SAMPLE = (
    "Engine 000: Avg prompt throughput: 1254.4 tokens/s, Avg generation throughput: 29.2 tokens/s"
)


@part
class VLLMLog:
    """``Avg prompt throughput: ..., Avg generation throughput: ...``, or a benchmark's summary."""

    def sniff(self, path: Path) -> int:
        return sum(bool(_OUTPUT.search(line)) or has_summary(line) for line in head(path))

    def read(self, path: Path) -> Log:
        if path.suffix in (".json", ".jsonl"):
            return Log("vllm", path, "serve", (), saved(path))
        entries: list[LogEntry] = []
        totals: dict[str, float] = {}
        for place, line in lines(path):
            totals |= summary(line, path, place)
            prompt = _PROMPT.search(line)
            if prompt is None:
                continue
            output = _OUTPUT.search(line)
            if output is None:
                if is_last(path, place):
                    break
                raise refuse(path, "vllm", SAMPLE)
            values = {
                "prompt_tokens_per_s": number(prompt[1], path, place, "prompt throughput"),
                "tokens_per_s": number(output[1], path, place, "generation throughput"),
            }
            entries.append(LogEntry(len(entries), place, values))
        if not entries and not totals:
            raise refuse(path, "vllm", SAMPLE)
        return Log("vllm", path, "serve", tuple(entries), totals)
