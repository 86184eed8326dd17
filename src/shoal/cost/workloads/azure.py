"""The Azure LLM inference traces of 2023: times and lengths of production requests.

The published rows are a time, the tokens of the prompt and the generated tokens;
the tokens themselves are drawn at random.

Source: Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting,
2024 (Azure/AzurePublicDataset, AzureLLMInferenceTrace, CC-BY 4.0).
"""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.cost.workloads.drawing import (
    Positive,
    Requests,
    Scale,
    check_sizes,
    clipped,
    token_ids,
)
from shoal.cost.workloads.trace import find_data, retimed
from shoal.ir import Arrival

SOURCE = "github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace_conv.csv or _code.csv)"
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@part
class Azure:
    """A production trace of conversations or code completion, as CSV.

    Args:
        path: path of the file, also searched in the directory ``SHOAL_DATA``.
        requests: number of first requests to take; None for all.
        rate: requests per second to which the times are stretched; None keeps them.
        scale: divisor of all lengths, for small models and machines.
    """

    path: str
    requests: Requests | None = 500
    rate: Positive | None = None
    scale: Scale = 1.0

    usual_path: ClassVar = "azure-llm-traces/conv.csv"

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """See :class:`~shoal.cost.workloads.protocols.Workload`.

        Raises:
            DataError: the file is missing, or a row is wrong; names the line and the fix.
        """
        check_sizes(count, vocab_size, max_position)
        path = find_data("workload.azure.path", self.path, SOURCE)
        results = []
        for index, (at, context, generated) in enumerate(_rows(path, count or self.requests)):
            size, output = clipped(
                round(context / self.scale), round(generated / self.scale), max_position
            )
            prompt = token_ids(size, vocab_size, seed, purpose="azure", index=index)
            results.append(Arrival(at, prompt, output))
        results.sort(key=lambda arrival: arrival.at)
        return retimed(results, self.rate)


def _rows(path: Path, most: int | None) -> list[tuple[float, int, int]]:
    """(time in s, prompt tokens, generated tokens) of the first ``most`` rows."""
    results: list[tuple[float, int, int]] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            header = tuple(rows.fieldnames or ())
            if header != COLUMNS:
                raise DataError(
                    f"{path}: columns {', '.join(header)[:200]}: expected {', '.join(COLUMNS)}; "
                    f"get the file from {SOURCE}"
                )
            for row in rows:
                if most is not None and len(results) >= most:
                    break
                results.append(_row(f"{path}, line {rows.line_num}", row))
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}: not text in UTF-8 ({cause}); expected a CSV file") from None
    except (OSError, csv.Error) as cause:
        raise DataError(f"{path}: cannot be read ({cause})") from None
    if not results:
        raise DataError(f"{path}: no request in it; get the file from {SOURCE}")
    return results


def _row(where: str, row: dict[str, str]) -> tuple[float, int, int]:
    try:
        # The seventh digit of the fraction is beyond what a datetime holds.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (ValueError, TypeError) as cause:
        raise DataError(f"{where}: {cause}; expected a time and two whole numbers") from None
    if context < 0 or generated < 0:
        raise DataError(f"{where}: {context} and {generated} tokens: expected 0 or more")
    # Without a zone, so that no clock of this machine plays a part.
    return (at.replace(tzinfo=None) - datetime(2023, 1, 1)).total_seconds(), context, generated
