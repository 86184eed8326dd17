"""How well templates group lines, against a known truth.

Source: Zhu et al., Tools and Benchmarks for Automated Log Parsing, 2019 (grouping accuracy); Dai et
al., Logram, 2020 (parsing accuracy); Jiang et al., A Large-Scale Evaluation for Log Parsing, 2024
(the two of groups).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.errors import DataError, require


class ParsingScores(NamedTuple):
    """Each 0 to 1.

    Args:
        grouping_accuracy: share of lines whose group is exactly a group of the truth.
        parsing_accuracy: share of lines whose template is that of the truth.
        group_f1: F1 of groups that are exactly a group of the truth (FGA).
        template_f1: F1 of those whose template is that of the truth besides (FTA).
        groups: of the parser.
        true_groups: of the truth.
    """

    grouping_accuracy: float
    parsing_accuracy: float
    group_f1: float
    template_f1: float
    groups: int
    true_groups: int


def scores(
    ids: npt.ArrayLike,
    templates: Sequence[str],
    true_ids: npt.ArrayLike,
    true_templates: Sequence[str],
) -> ParsingScores:
    """Compare a grouping of lines with the true one.

    Args:
        ids: int [n], template of each line.
        templates: text of each; spaces in a row count as one.
        true_ids: int [n], true template of each line.
        true_templates: text of each.

    Raises:
        ConfigError: the two are of different lengths, or of no line.
    """
    ours, truth = np.asarray(ids, np.int64), np.asarray(true_ids, np.int64)
    require(
        0 < len(ours) == len(truth),
        "scores",
        f"{len(ours)} lines and a truth of {len(truth)}",
        expected="as many, and at least one",
    )
    pairs, sizes = np.unique(np.stack([ours, truth]), axis=1, return_counts=True)
    of_ours, of_truth = np.bincount(ours), np.bincount(truth)
    exact = (sizes == of_ours[pairs[0]]) & (sizes == of_truth[pairs[1]])
    same = np.array(
        [
            " ".join(templates[a].split()) == " ".join(true_templates[b].split())
            for a, b in pairs.T.tolist()
        ]
    )
    groups, true_groups = int((of_ours > 0).sum()), int((of_truth > 0).sum())
    return ParsingScores(
        grouping_accuracy=float(sizes[exact].sum() / len(ours)),
        parsing_accuracy=float(sizes[same].sum() / len(ours)),
        # F1 of c right ones of p that are said and t that there are is 2c / (p + t).
        group_f1=float(2 * exact.sum() / (groups + true_groups)),
        template_f1=float(2 * (exact & same).sum() / (groups + true_groups)),
        groups=groups,
        true_groups=true_groups,
    )


class LogTruth(NamedTuple):
    """The truth beside a log, in Loghub's layout.

    Args:
        ids: int64 [n], template of each line.
        templates: text of each.
    """

    ids: npt.NDArray[np.int64]
    templates: list[str]


def read_truth(data: bytes, where: str) -> LogTruth:
    """The file ``X.log_structured.csv`` of Loghub.

    Raises:
        DataError: it has not the columns EventId and EventTemplate, or is no CSV.
    """
    try:
        rows = csv.DictReader(io.StringIO(data.decode("utf-8", "replace"), newline=""))
        events = [(row["EventId"], row["EventTemplate"]) for row in rows]
    except (KeyError, csv.Error) as cause:
        raise DataError(
            f"{where}: cannot be read as the truth of a log ({cause}); it needs the columns "
            "EventId and EventTemplate, or must have another name"
        ) from cause
    known: dict[str, int] = {}
    templates: list[str] = []
    ids = []
    for event, template in events:
        if event not in known:
            known[event] = len(templates)
            templates.append(template or "")
        ids.append(known[event])
    return LogTruth(np.array(ids, np.int64), templates)
