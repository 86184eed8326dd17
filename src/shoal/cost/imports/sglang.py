"""Logs of SGLang: the lines of its scheduler, and its benchmark's summary.

Source: the scheduler metrics of SGLang 0.4 and 0.5; ``sglang.bench_serving``.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.parts import part
from shoal.cost.imports.benchmark import has_summary, saved, summary
from shoal.cost.imports.log import Log, LogEntry, head, is_last, lines, number, refuse

_LINE = re.compile(r"\bDecode batch\b")
_OUTPUT = re.compile(r"gen throughput \(token/s\): ([^\s,]+)")
_INPUT = re.compile(r"\bPrefill batch\b.*input throughput \(token/s\): ([^\s,]+)")
SAMPLE = "Decode batch, #running-req: 9, #token: 11584, gen throughput (token/s): 22.40"


@part
class SGLangLog:
    """``Decode batch, ... gen throughput (token/s): ...``, or a benchmark's summary.

    Tensor-parallel ranks print equal lines; those of the first rank are used.
    """

    def sniff(self, path: Path) -> int:
        decoding = sum(bool(_OUTPUT.search(line)) for line in head(path))
        # Both engines' benchmarks print the same summary; SGLang's names its backend.
        named = any("sglang" in line.lower() for line in head(path))
        return decoding + (2 * sum(has_summary(line) for line in head(path)) if named else 0)

    def read(self, path: Path) -> Log:
        if path.suffix in (".json", ".jsonl"):
            return Log("sglang", path, "serve", (), saved(path))
        entries: list[LogEntry] = []
        totals: dict[str, float] = {}
        for place, line in lines(path):
            totals |= summary(line, path, place)
            if re.search(r"\bTP(?!0\b)\d+\b", line):
                continue
            entering = _INPUT.search(line)
            if entering:
                rate = number(entering[1], path, place, "input throughput")
                entries.append(LogEntry(len(entries), place, {"prompt_tokens_per_s": rate}))
            if _LINE.search(line) is None:
                continue
            output = _OUTPUT.search(line)
            if output is None:
                if is_last(path, place):
                    break
                raise refuse(path, "sglang", SAMPLE)
            rate = number(output[1], path, place, "gen throughput")
            entries.append(LogEntry(len(entries), place, {"tokens_per_s": rate}))
        if not entries and not totals:
            raise refuse(path, "sglang", SAMPLE)
        return Log("sglang", path, "serve", tuple(entries), totals)
