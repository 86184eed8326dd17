"""Which windows make up a step: a function of the seed and the global step alone.

Sample g of a run is row ``g % B`` of step ``g // B``; it is window ``permutation(g % W)``
of epoch ``g // W``, for W windows an epoch. No state is kept, so any number of ranks
and any resumed run see the same tokens in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, DataError, require
from shoal.core.parts import Choice
from shoal.core.random import Permutation
from shoal.core.traits import traits
from shoal.corpora import PACKINGS
from shoal.corpora.protocols import Packing
from shoal.corpora.tokens import TokenSplit


class Batch(NamedTuple):
    """What one rank trains on in one step.

    Args:
        tokens: int64 [B/world, T+1]; inputs are ``[:, :-1]``, targets ``[:, 1:]``.
        documents: int32 [B/world, T+1] or None: attention and loss stay inside equal ids.
        learned: int64 [B/world, T+1] or None: as targets, those that are 0 count nothing.
    """

    tokens: np.ndarray
    documents: np.ndarray | None
    learned: np.ndarray | None


def batch(
    split: TokenSplit,
    packing: Packing | Choice | str | Mapping[str, object],
    *,
    seq_len: int,
    global_batch: int,
    seed: int,
    step: int,
    rank: int = 0,
    world: int = 1,
) -> Batch:
    """The rows of one rank of the global batch of ``step``.

    Args:
        split: the tokens.
        packing: how windows are cut.
        seq_len: T.
        global_batch: B, over all ranks.
        seed: seed of the run.
        step: global step, from 0.
        rank: gets rows ``rank * B / world`` and on.
        world: number of data-parallel ranks, a divisor of B.

    Raises:
        DataError: the split is shorter than one batch.
        ConfigError: the ranks cannot share the batch evenly.
    """
    require(
        world >= 1 and global_batch % world == 0,
        "global_batch",
        global_batch,
        expected=f"a multiple of the {world} data-parallel ranks",
    )
    if not 0 <= rank < world or step < 0:
        raise ConfigError(
            f"rank {rank} of {world}, step {step}: expected a rank below, a step >= 0"
        )
    cut = _packing(packing)
    windows = check_split(split, cut, seq_len=seq_len, global_batch=global_batch)
    rows = global_batch // world
    first = step * global_batch + rank * rows
    tokens: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    while rows:
        epoch, position = divmod(first, windows)
        take = min(rows, windows - position)
        chosen = Permutation(windows, seed, epoch)(np.arange(position, position + take))
        result, ids = cut.fill(split, chosen, seq_len=seq_len, seed=seed, epoch=epoch)
        tokens.append(result)
        if ids is not None:
            documents.append(ids)
        if split.learned is not None:
            flags, _ = cut.fill(split.learned, chosen, seq_len=seq_len, seed=seed, epoch=epoch)
            learned.append(flags)
        first += take
        rows -= take
    return Batch(
        np.concatenate(tokens),
        np.concatenate(documents) if documents else None,
        np.concatenate(learned) if learned else None,
    )


def check_split(
    split: TokenSplit,
    packing: Packing | Choice | str | Mapping[str, object],
    *,
    seq_len: int,
    global_batch: int,
) -> int:
    """Windows of one epoch, when they fill at least one batch.

    Raises:
        DataError: the split is shorter; says how many tokens there are and are needed.
    """
    windows = _packing(packing).num_windows(split, seq_len)
    if windows < global_batch:
        raise DataError(
            f"data: the {split.name} split has {len(split):,} tokens, and one batch of "
            f"{global_batch} x {seq_len} needs {global_batch * seq_len + 1:,}; "
            "give more text, or lower global_batch or seq_len"
        )
    return windows


def cut_documents(split: TokenSplit, packing: Choice, *, seq_len: int) -> int:
    """Documents whose ends a packing never reads, since they are longer than a sequence."""
    if "keeps_beginnings" not in traits("packing", packing):
        return 0
    return int((np.diff(split.offsets) > seq_len + 1).sum())


def _packing(packing: Packing | Choice | str | Mapping[str, object]) -> Packing:
    if isinstance(packing, Choice | str | Mapping):
        built: Packing = PACKINGS.build(packing)
        return built
    return packing
