"""Which square blocks of a mask are seen, torch-free."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from shoal.ir.mask import Mask

_CACHE: WeakKeyDictionary[Mask, dict[int, np.ndarray]] = WeakKeyDictionary()


def block_table(mask: Mask, block: int) -> np.ndarray:
    """Of each block 0 for nothing seen, 1 for some, 2 for all; int8 [T / block, S / block].

    The last block of a row or column may be smaller.
    """
    known = _CACHE.setdefault(mask, {})
    if block not in known:
        columns = np.arange(0, mask.num_keys, block)
        widths = np.minimum(block, mask.num_keys - columns)
        results = []
        for start in range(0, mask.num_queries, block):
            rows = np.arange(start, min(start + block, mask.num_queries))
            counts = np.add.reduceat(mask.dense(rows).sum(0, dtype=np.int64), columns)
            results.append((counts > 0).astype(np.int8) + (counts == widths * len(rows)))
        known[block] = np.stack(results).astype(np.int8)
    return known[block]
