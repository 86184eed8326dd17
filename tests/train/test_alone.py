"""Two runs in one directory: the second is refused and names the first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.core.errors import ConfigError
from shoal.ir import TrainPlan
from shoal.train.run import execute
from shoal.train.run_lock import alone
from shoal.train.watch.robust import Robust, execute_robust

NO_PLAN = cast("TrainPlan", None)


def test_the_second_run_in_a_directory_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    @alone
    def first(_plan: TrainPlan, run_dir: Path) -> str:
        for second in (execute, lambda *given: execute_robust(*given, Robust())):
            with pytest.raises(ConfigError) as caught:
                cast("Any", second)(NO_PLAN, run_dir)
            refused.append(str(caught.value))
        return "ran"

    run = tmp_path / "run"
    assert first(NO_PLAN, run) == "ran"
    assert len(refused) == 2
    for message in refused:
        assert f"{run}: another process runs here (pid {os.getpid()}, host " in message
    assert first.__doc__ == first.__wrapped__.__doc__  # type: ignore[attr-defined]


def test_a_run_that_is_over_holds_nothing(tmp_path: Path) -> None:
    @alone
    def run(_plan: TrainPlan, _run_dir: Path) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(NO_PLAN, tmp_path / "run")
        assert not (tmp_path / "run").exists(), "nothing of a run that could not start"
