"""``shoal check`` as its user meets it: what it prints, and its status."""

import json
import sys
from pathlib import Path

import pytest

from shoal.app.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "check"


def shoal(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["shoal", "check", *map(str, words)])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere.py",), "FILE = 'nowhere.py': expected a Python file"),
        (("x.py", "--mesh", "dp"), "--mesh = 'dp': expected axes and sizes"),
        (("x.py", "--mesh", "dp=2", "--ranks", 3), "--ranks = 3: expected 2, the product of"),
        (("x.py", "--mesh", "dp=1"), "expected 2 to 64 ranks"),
        (("x.py", "--tolerance", 0), "tolerance"),
    ],
)
def test_what_cannot_be_checked_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[object, ...],
    told: str,
) -> None:
    assert shoal(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1


@pytest.mark.multi
def test_errors_of_the_file_have_file_and_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "step.py"
    file.write_text("import torch\n\ndef model(:\n")
    assert shoal(monkeypatch, file, "-q") == 2
    error = capsys.readouterr().err
    assert f"{file}, line 3: SyntaxError" in error and "Traceback" not in error


@pytest.mark.multi
@pytest.mark.slow
def test_verdicts_and_their_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert shoal(monkeypatch, EXAMPLES / "ddp.py") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("equal: 2 ranks (dp 2) compute the same as one process")
    assert "relative error" in shown
    alone = tmp_path / "alone.py"
    text = (EXAMPLES / "ddp.py").read_text()
    alone.write_text(text.replace("return DistributedDataParallel(model)", "return model"))
    assert shoal(monkeypatch, alone, "-o", "json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["equal"] and verdict["first"] == "0.weight"
    assert verdict["findings"][0]["kind"] == "missing_reduction"
