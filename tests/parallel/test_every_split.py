"""Every tensor-, pipeline- and data-parallel split of up to eight ranks, dropout on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one

_SIZES = (1, 2, 4, 8)


def _every() -> list[dict[str, Any]]:
    """tp, pp, vpp, dp, sp with at most eight ranks, and at most the eight layers as stages."""
    results = []
    for tp, pp, dp, vpp in itertools.product(_SIZES, repeat=4):
        if not 1 < tp * pp * dp <= 8 or pp * vpp > 8 or (pp == 1 and vpp > 1):
            continue
        split: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp}
        split["schedule"] = "interleaved" if vpp > 1 else "1f1b"
        results += [{**split, "sp": sp} for sp in ((False, True) if tp > 1 else (False,))]
    return results


def _cases() -> list[Any]:
    """Tied and untied by turns; the other half, and most of eight ranks, in longer runs."""
    cases = []
    for number, split in enumerate(_every()):
        for tied in (False, True):
            eight = split["tp"] * split["pp"] * split["dp"] == 8
            later = number % 2 == tied or (eight and number % 4 > 0)
            marks = pytest.mark.soak if later else pytest.mark.slow
            name = f"{split}-{'tied' if tied else 'untied'}"
            cases.append(pytest.param(split, tied, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("split", "tied"), _cases())
def test_equals_one_process(split: dict[str, Any], tied: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        microbatches = max(2, split["pp"])
        changes = {
            "dropout": 0.2,
            "microbatch": 1,
            "global_batch": split["dp"] * microbatches,
            "seq_len": 8,
        }
        result = same_as_one(job(split, **changes), config(tied=tied), steps=1)
    finally:
        torch.set_num_threads(before)
    assert result.same, str(result)


def test_the_list_is_whole() -> None:
    axes = ("tp", "pp", "vpp", "dp", "sp")
    chosen = {tuple(split[axis] for axis in axes) for split in _every()}
    assert len(chosen) == len(_every())
    assert {(8, 1, 1, 1, True), (1, 8, 1, 1, False), (2, 2, 4, 2, True)} <= chosen
