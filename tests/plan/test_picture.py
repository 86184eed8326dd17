"""Plans to look at: the page shows the numbers of the plans, and the pipeline of the best."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError
from shoal.ir import TrainJob, TrainPlan
from shoal.machine.described import load
from shoal.plan.picture import page, pictures, timeline
from shoal.plan.strategy import PLANNERS
from shoal.plan.table import choices, details, numbers
from shoal.plan.what_if import WhatIfResult


def plans(**changes: object) -> list[TrainPlan]:
    job = {"model": "Qwen3-0.6B", "seq_len": 1024, "global_batch": 64, **changes}
    plans: list[TrainPlan] = PLANNERS.build("search").plan(
        TrainJob.model_validate(job), load("8xH100")
    )
    return plans[:3]


def test_the_timeline_is_of_the_plans_own_schedule() -> None:
    piped = plans(parallel={"pp": 4, "dp": 2}, microbatch=4)[0]
    result = timeline(piped)
    assert result is not None
    drawn, note = result
    assert note == ""
    assert drawn.ranks == 4
    assert len(drawn) == 4 * 2 * 8  # stages, forward and backward, micro-batches
    many = plans(parallel={"pp": 4, "dp": 2}, microbatch=1)[0]
    result = timeline(many)
    assert result is not None
    assert result[1] == ", the first 8 of 32 micro-batches"
    split = plans(parallel={"pp": 4, "dp": 2, "vocab": "pp"}, microbatch=4)[0]
    result = timeline(split)
    assert result is not None
    assert len(result[0]) == 4 * 6 * 8  # and four passes of the vocabulary
    assert timeline(plans(parallel={"dp": 8})[0]) is None


def test_the_page_has_every_number_and_no_link_outside() -> None:
    shown = plans(parallel={"pp": 4, "dp": 2})
    answers = [
        WhatIfResult("twice the devices", 0.5, 1.0, "dp4"),
        WhatIfResult("half", None, None, "none fits"),
    ]
    html = page(shown, answers, title="A <model>")
    for table in (numbers(shown), choices(shown), details(shown)):
        assert all(cell in html for row in table.rows for cell in row)
    assert "A &lt;model&gt;" in html
    assert "twice the devices" in html
    assert "0.50x" in html
    assert html.count("<svg") == 3
    assert 'href="http' not in html
    assert "src=" not in html


def test_plans_without_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match="at least one"):
        pictures([])
    bare = plans()[0].model_copy(update={"estimate": None})
    with pytest.raises(PlanError, match="plan the job again"):
        pictures([bare])
