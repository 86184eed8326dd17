"""What a run reports while it runs reaches the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shoal.app import show
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


def test_the_bar_shows_phase_rate_loss_and_time_left_in_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(show, "console", lambda **_: screen)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    start = {"kind": "start", "step": 0, "total": 50_000, "resumed": False}
    step = {"kind": "step", "loss": 10.234, "tokens_per_s": 1_234_567.0, "step_s": 0.1}
    with TrainingBar() as bar:
        bar({**start, "parameters": 7, "ranks": 2})
        for number in (0, 1, 12_344):
            bar({**step, "step": number, "mfu": 0.3, "memory_bytes": 2**30})
        assert bar._bar is not None
        for phase in ("training", "evaluating", "saving", "training"):
            bar(
                {**step, "step": 12_344}
                if phase == "training"
                else {"kind": "phase", "phase": phase}
            )
            other = Console(file=io.StringIO(), width=80)
            with other.capture() as captured:
                other.print(bar._bar.get_renderable())
            (line,) = captured.get().splitlines()
            assert len(line.rstrip()) <= 80, line
            for part in (phase, "12345/50000", "loss 10.234", "1,234,567 tok/s", "left"):
                assert part in line, line
