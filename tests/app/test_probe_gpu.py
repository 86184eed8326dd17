"""``shoal probe gpu`` where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.errors import ConfigError, MachineError

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["probe", "gpu", "--budget", "1"])
    assert isinstance(done.exception, MachineError)
    assert "sees no CUDA device" in str(done.exception) and "-m H100" in str(done.exception)
    assert not list(tmp_path.rglob("*.npz"))


def test_an_unknown_sweep_is_refused() -> None:
    done = CliRunner().invoke(app, ["probe", "gpus"])
    assert isinstance(done.exception, ConfigError) and "gemm, gpu, decode" in str(done.exception)
