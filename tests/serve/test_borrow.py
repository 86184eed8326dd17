"""Copies to lenders: what has arrived is told, whatever becomes of those behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from shoal.plan.batching.cache.distributed import BlockLoan
from shoal.serve.cluster.borrow import _Copies
from shoal.serve.cluster.lending import LenderLostError


class _Lender:
    def __init__(self, gone: LenderLostError | None = None) -> None:
        self.gone = gone

    def put(self, _cache: Any, blocks: list[int], _targets: list[int]) -> int:
        if self.gone is not None:
            raise self.gone
        return 10 * len(blocks)

    def close(self) -> None:
        pass


def _lend(number: int, instance: int) -> BlockLoan:
    request: Any = SimpleNamespace(id="long")
    return BlockLoan(number, request, number, number, instance, 0)


def test_a_lender_that_is_lost_takes_no_copy_of_another_with_it() -> None:
    copies = _Copies(SimpleNamespace(cache=None))  # type: ignore[arg-type]
    lost = LenderLostError(2, "gone")
    copies.creditors = {1: _Lender(), 2: _Lender(lost), 3: _Lender()}  # type: ignore[dict-item]
    lends = [_lend(0, 1), _lend(1, 2), _lend(2, 3)]
    copies.begin(lends)
    copies._pool.shutdown(wait=True)
    assert copies.over() == lends[:1]
    with pytest.raises(LenderLostError):
        copies.over()
    assert copies.over() == lends[2:]
    assert copies.moved_bytes == 20
    assert not copies.busy
