from pathlib import Path

from shoal.train.layout import RunDir, model_name


def test_a_model_is_called_after_its_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "notes")
    run.export.mkdir(parents=True)
    assert model_name(run.export) == "export", "no run lies around it"
    run.plan.touch()
    assert model_name(run.export) == "notes"
    assert model_name(tmp_path / "notes" / "." / "export") == "notes"
    assert model_name(tmp_path / "Qwen3-8B") == "Qwen3-8B"
