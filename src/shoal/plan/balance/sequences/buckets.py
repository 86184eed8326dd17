"""A few lengths in the place of many: the buckets that lose the least.

Lengths of a bucket are all taken for its longest one. With sorted lengths the best buckets are
consecutive runs, which dynamic programming finds.

Source: Wang et al., FlexSP, 2024, section 4.1 (sequence bucketing).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bucketed(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of the sequences of each bucket, longest bucket first.

    Args:
        lengths: tokens of each sequence, at least one.
        most: buckets there may be, Q.

    Returns:
        Buckets with the least sum of (longest of the bucket - length).
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    values, counts = np.unique(np.asarray(lengths)[order], return_counts=True)
    values, counts = values[::-1].astype(np.float64), counts[::-1]  # falling
    number = len(values)
    most = min(most, number)
    tokens = np.concatenate([[0.0], np.cumsum(values * counts)])
    items = np.concatenate([[0], np.cumsum(counts)])
    # best[j]: least loss of the first j values in q buckets; a bucket from i is as long as i.
    best = np.full(number + 1, np.inf)
    best[0] = 0.0
    cut = np.zeros((most + 1, number + 1), dtype=np.int64)
    for q in range(1, most + 1):
        array = np.full(number + 1, np.inf)
        for j in range(q, number + 1):
            starts = np.arange(q - 1, j)
            loss = values[starts] * (items[j] - items[starts]) - (tokens[j] - tokens[starts])
            total = best[starts] + loss
            at = int(total.argmin())
            array[j], cut[q, j] = total[at], starts[at]
        best = array
    buckets = []
    end = number
    for q in range(most, 0, -1):
        start = int(cut[q, end])
        buckets.append(order[items[start] : items[end]].tolist())
        end = start
    return buckets[::-1]
