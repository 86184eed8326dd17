"""Traces in files: our own format, and where the traces of others are looked for.

A trace is JSONL, one request a line::

    {"at": 0.25, "prompt": [17, 4, 99], "output_tokens": 12, "session": "s0"}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.errors import DataError
from shoal.core.files import expanded
from shoal.core.parts import part
from shoal.cost.workloads.drawing import Positive, Requests, check_sizes, clipped
from shoal.ir import Arrival


@part
class TraceWorkload:
    """Requests of a JSONL file: at, prompt, output_tokens and, optionally, session.

    Args:
        path: the file.
        requests: number of first requests to take; None for all.
        rate: requests per second to which the times are stretched; None keeps them.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"recorded"})

    path: str
    requests: Requests | None = None
    rate: Positive | None = None

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """See :class:`~shoal.cost.workloads.protocols.Workload`.

        Raises:
            DataError: the file is missing, or a line is wrong; names the line and the fix.
        """
        check_sizes(count, vocab_size, max_position)
        results = []
        path = expanded(self.path)
        if not path.is_file():
            raise DataError(
                f"workload.trace.path = {self.path!r}: no such file; give the path of a "
                "trace in JSONL, or choose a workload that needs no file, such as chat"
            )
        for where, row in read_lines(path, count or self.requests):
            results.append(_arrival(where, row, vocab_size, max_position))
        if not results:
            raise DataError(f"{path}: no request in it; expected one a line")
        for index in range(1, len(results)):
            if results[index].at < results[index - 1].at:
                raise DataError(
                    f"{path}, request {index + 1}: at = {results[index].at} is before the one "
                    "above "
                    f"it, {results[index - 1].at}; sort the lines by time"
                )
        return retimed(results, self.rate)


def retimed(arrivals: list[Arrival], rate: float | None) -> list[Arrival]:
    """The arrivals from time 0 on, stretched so that ``rate`` come in a second on average."""
    start = arrivals[0].at
    span = arrivals[-1].at - start
    factor = 1.0
    if rate is not None and span > 0:
        factor = (len(arrivals) - 1) / rate / span
    return [
        Arrival((one.at - start) * factor, one.prompt, one.output_tokens, one.session)
        for one in arrivals
    ]


def find_data(where: str, path: str, source: str) -> Path:
    """The file ``path``, which may be below ``$SHOAL_DATA``.

    Args:
        where: the option that gave it.
        path: as it was given.
        source: where people get the file.

    Raises:
        DataError: it is in neither place.
    """
    direct = expanded(path)
    if direct.is_file():
        return direct
    folder = os.environ.get("SHOAL_DATA")
    if folder and (expanded(folder) / path).is_file():
        return expanded(folder) / path
    below = f"there is none at {expanded(folder) / path} either" if folder else "not set"
    raise DataError(
        f"{where} = {path!r}: there is no such file, and SHOAL_DATA, the folder of data sets, "
        f"helps nothing: {below}; get the file from {source}, and give its path or set "
        "SHOAL_DATA to the folder that it is in"
    )


def read_lines(path: Path, most: int | None) -> list[tuple[str, dict[str, Any]]]:
    """(place, object) of the first ``most`` lines of a JSONL file.

    Raises:
        DataError: a line that is not a JSON object, or bytes that are not text.
    """
    results: list[tuple[str, dict[str, Any]]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if most is not None and len(results) >= most:
                    break
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, RecursionError) as cause:
                    raise DataError(f"{where}: not JSON ({cause}); correct the line") from None
                if not isinstance(row, dict):
                    raise DataError(
                        f"{where}: expected an object of keys, found {type(row).__name__}"
                    )
                results.append((where, row))
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}: not text in UTF-8 ({cause}); expected a JSONL file") from None
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror})") from None
    return results


def number_of(where: str, row: dict[str, Any], key: str, *, least: float) -> float:
    """A number of a row.

    Raises:
        DataError: it is missing, no number, or below ``least``.
    """
    value = row.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not least <= value < 1e15:  # type: ignore[operator]
        raise DataError(f"{where}: {key} = {value!r}: expected a number of {least:g} or more")
    return float(value)  # type: ignore[arg-type]


def _all_tokens(prompt: list[Any], vocab_size: int) -> bool:
    return all(type(token) is int and 0 <= token < vocab_size for token in prompt)


def _arrival(where: str, row: dict[str, Any], vocab_size: int, max_position: int) -> Arrival:
    unknown = set(row) - {"at", "prompt", "output_tokens", "session"}
    if unknown:
        raise DataError(
            f"{where}: {sorted(unknown)[0]!r}: no such key; expected at, prompt, output_tokens, "
            "session"
        )
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt or not _all_tokens(prompt, vocab_size):
        raise DataError(
            f"{where}: prompt: expected a list of token ids from 0 to {vocab_size - 1}, the "
            "model's vocabulary, with at least one"
        )
    at = number_of(where, row, "at", least=0)
    output = int(number_of(where, row, "output_tokens", least=1))
    session = row.get("session", "")
    if not isinstance(session, str):
        raise DataError(f"{where}: session = {session!r}: expected a string")
    size, output = clipped(len(prompt), output, max_position)
    return Arrival(at, tuple(prompt[:size]), output, session)
