"""What a run reports while it runs reaches the terminal."""

from __future__ import annotations

import pytest

from shoal.app.show import TrainingBar


def test_failed_saves_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with TrainingBar() as bar:
        for step in (5, 10):
            bar({"kind": "checkpoint_failed", "step": step, "message": "disk full while saving"})
        level = {"kind": "checkpoint_level", "step": 5, "place": "s3://b/x", "message": "HTTP 500"}
        bar({**level, "state": "failed"})
        bar({**level, "state": "retry"})
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "step 5: the checkpoint was NOT saved: disk full while saving" in shown
    assert "step 10: the checkpoint was NOT saved" in shown
    assert shown.count("HTTP 500") == 1
