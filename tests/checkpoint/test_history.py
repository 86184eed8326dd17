"""What events tell of the saves of a run, in words and pictures."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from shoal.checkpoint.history import (
    SaveRecord,
    heat_map,
    history,
    pick,
    slowest,
    stalls,
    timeline,
)
from shoal.core.errors import CheckpointError, ConfigError
from shoal.core.svg_rows import HeatMap


def event(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "checkpoint", "step": step, "time": 1.0, "seconds": 2.0, "mode": "lazy", **more}


RANKS = {
    "blocked_s": {"plan": 0.25, "before_update": 0.5},
    "ranks_s": [{"plan": 0.25, "write": 1.0}, {"plan": 0.5, "write": 0.75}],
    "ranks_spans_s": [
        {"plan": [0.0, 0.25], "write": [0.25, 1.25]},
        {"plan": [0.0, 0.5], "write": [0.5, 1.25]},
    ],
    "ranks_bytes": [7, 9],
}


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter() if node.tag.endswith("text")]


def test_the_newest_of_a_step_counts_and_levels_belong_to_theirs() -> None:
    far = {"kind": "checkpoint_level", "step": 2, "place": "s3://b", "tries": 1}
    result = history(
        [
            event(1),
            {"kind": "step", "step": 1},
            {"kind": "checkpoint_failed", "step": 2, "message": "full"},
            event(2, **RANKS),
            {**far, "state": "retry"},
            {**far, "state": "complete", "tries": 2},
            {"kind": "checkpoint_failed", "step": 3, "message": "full"},
        ]
    )
    assert [(one.step, one.failed) for one in result] == [(1, False), (2, False), (3, True)]
    assert result[0].stall_s == 2.0  # of an event without causes
    assert result[1].stall_s == 0.75
    assert result[2].stall_s is None and result[2].message == "full"
    (stay,) = result[1].levels
    assert (stay.place, stay.state, stay.tries) == ("s3://b", "complete", 2)
    assert [share.nbytes for share in result[1].ranks] == [7, 9]


def test_who_was_slowest_and_when() -> None:
    save = SaveRecord.of(event(4, **RANKS))
    assert slowest(save) == {"plan": 1, "write": 0}
    grid = heat_map(save)
    assert list(grid.columns) == ["plan", "write"] and grid.values == [[0.25, 1.0], [0.5, 0.75]]
    assert {"rank 0", "rank 1", "plan", "write", "250 ms", "1 s"} <= set(texts(grid.render()))
    drawn = timeline(save).render()
    assert drawn.count("<rect") == 4 + 2 and "plan 500 ms" in drawn  # bars and legend
    stood = stalls([save]).render()
    assert stood.count("<rect") == 2 + 2 and "before_update 500 ms" in stood


def test_which_save_is_shown() -> None:
    saves = [
        SaveRecord.of(event(1, **RANKS)),
        SaveRecord.of(event(2, **RANKS)),
        SaveRecord.of(event(3)),
    ]
    assert pick(saves, None).step == 2 and pick(saves, 1).step == 1
    with pytest.raises(CheckpointError, match=r"no save of step 3 .* those that have: 1, 2"):
        pick(saves, 3)


def test_nothing_to_draw() -> None:
    with pytest.raises(ConfigError, match="no bar"):
        stalls([SaveRecord.of(event(1))]).render()
    with pytest.raises(ConfigError, match="at least one row"):
        HeatMap(title="t", description="d", rows=[], columns=[], values=[]).render()
    with pytest.raises(ConfigError, match="1 rows of 2"):
        HeatMap(title="t", description="d", rows=["a"], columns=["b", "c"], values=[[1.0]]).render()


def test_names_are_escaped_and_gaps_left_white() -> None:
    drawn = HeatMap(
        title="<t>", description="d", rows=["<r>"], columns=["<c>", "e"], values=[[math.nan, 0.0]]
    ).render()
    assert "<r>" not in drawn and drawn.count("<rect") == 1
    assert ET.fromstring(drawn) is not None
