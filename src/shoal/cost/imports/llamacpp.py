"""Logs of llama.cpp: the times of each request, and the table of its benchmark.

Source: ``print_timing`` of the server, ``llama_perf_context_print``, and ``llama-bench``.
"""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.parts import part
from shoal.cost.imports.log import Log, LogEntry, head, lines, number, refuse

_PROMPT = re.compile(r"prompt eval time\s*=\s*(\S+) ms\s*/\s*(\d+) tokens")
_OUTPUT = re.compile(r"(?<!prompt )\beval time\s*=\s*(\S+) ms\s*/\s*(\d+) (?:runs|tokens)")
_BENCH = re.compile(r"\|\s*(pp|tg)(\d+)[^|]*\|\s*([0-9.]+)\s*(?:±[^|]*)?\|\s*$")
SAMPLE = "eval time = 1234.56 ms / 128 runs ( 9.64 ms per token, 103.68 tokens per second)"


@part
class LlamaCppLog:
    """``prompt eval time = ...`` and ``eval time = ...`` of each request, or ``llama-bench``.

    Times are of one request, without queueing; the server does not print its total throughput.
    """

    def sniff(self, path: Path) -> int:
        total = 0
        for line in head(path):
            total += any(pattern.search(line) for pattern in (_PROMPT, _OUTPUT, _BENCH))
        return total

    def read(self, path: Path) -> Log:
        entries: list[LogEntry] = []
        for place, line in lines(path):
            values: dict[str, float] = {}
            prompt, output, bench = (p.search(line) for p in (_PROMPT, _OUTPUT, _BENCH))
            if prompt:
                seconds = 1e-3 * number(prompt[1], path, place, "prompt eval time")
                values["ttft_p50_s"] = seconds
                if seconds > 0:
                    values["prompt_tokens_per_s"] = int(prompt[2]) / seconds
            if output and int(output[2]) > 0:
                seconds = 1e-3 * number(output[1], path, place, "eval time")
                if seconds > 0:
                    values["tpot_p50_s"] = seconds / int(output[2])
                    values["decode_tokens_per_s"] = int(output[2]) / seconds
            if bench:
                rate = number(bench[3], path, place, "t/s")
                quantity = "decode_tokens_per_s" if bench[1] == "tg" else "prompt_tokens_per_s"
                values[quantity] = rate
                if bench[1] == "tg" and rate > 0:
                    values["tpot_p50_s"] = 1 / rate
            if values:
                entries.append(LogEntry(len(entries), place, values))
        if not entries:
            raise refuse(path, "llamacpp", SAMPLE)
        return Log("llamacpp", path, "serve", tuple(entries))
