"""Real files over real gloo ranks: what is equal passes, planted bugs are named."""

import tempfile
from pathlib import Path

import pytest

import forked_children
from shoal.claims.check.protocols import CheckSettings, CheckVerdict
from shoal.claims.check.run import check
from shoal.core.errors import ConfigError, RankError

HERE = Path(__file__).parent / "check_files"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "check"

TAIL = """
def parallelize(model):
    return torch.nn.parallel.DistributedDataParallel(model)
"""
HEAD = """
import os, time
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5 if os.environ.get("DROP") else 0.0))

def batch(step):
    return torch.randn(4, 4)

second = os.environ.get("WORLD_SIZE") == "2" and os.environ["RANK"] == "1"

"""


def run(
    monkeypatch: pytest.MonkeyPatch, file: Path, planted: str, **options: object
) -> CheckVerdict:
    monkeypatch.setenv("PLANTED", planted)
    return check(CheckSettings.model_validate({"file": str(file), **options}))


def write(place: Path, text: str) -> str:
    path = place / "step.py"
    path.write_text(HEAD + text + TAIL)
    return str(path)


@pytest.mark.multi
@pytest.mark.slow
def test_wrong_divisor_with_ragged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, HERE / "ragged_ddp.py", "divisor")
    assert not result.equal and result.steps == 1 and not result.loss_equal
    assert result.findings[0].kind == "wrong_divisor"
    assert "0.5, 0.5; in the whole batch they have 0.8125, 0.1875" in result.findings[0].text
    assert result.first == "0.weight"


@pytest.mark.slow
@pytest.mark.multi
def test_missing_reduction_on_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, HERE / "sequence_parallel.py", "norm", mesh={"dp": 1, "tp": 2})
    assert not result.equal and result.loss_equal
    assert result.findings[0].kind == "missing_reduction" and "over tp" in result.findings[0].text
    assert set(result.culprits) == {"blocks.1.norm.weight", "blocks.1.norm.bias"}
    assert result.first == "blocks.1.norm.weight"


@pytest.mark.multi
@pytest.mark.slow
def test_bias_that_every_rank_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, HERE / "sequence_parallel.py", "bias")
    assert not result.equal and not result.loss_equal
    assert result.findings[0].kind == "bias_added_times"
    assert result.culprits == ("blocks.0.down.bias",)
    assert "added 2 times, once by every rank of tp" in result.findings[0].text


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.soak
def test_bias_that_is_zero_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, HERE / "row_bias.py", "bias")
    assert not result.equal and result.steps == 2
    assert result.findings[0].kind == "bias_added_times" and result.culprits == ("down.bias",)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "planted", "options"),
    [
        pytest.param(EXAMPLES / "ddp.py", "", {"ranks": 4}, marks=pytest.mark.soak),
        (EXAMPLES / "fsdp2.py", "", {}),
        (EXAMPLES / "tensor_parallel.py", "", {}),
        pytest.param(
            EXAMPLES / "tensor_parallel.py", "", {"dtype": "float32"}, marks=pytest.mark.soak
        ),
        pytest.param(EXAMPLES / "pipeline.py", "", {}, marks=pytest.mark.soak),
        pytest.param(HERE / "sequence_parallel.py", "none", {}, marks=pytest.mark.soak),
        pytest.param(HERE / "ragged_ddp.py", "none", {}, marks=pytest.mark.soak),
        pytest.param(HERE / "row_bias.py", "none", {}, marks=pytest.mark.soak),
        pytest.param(HERE / "trainer.py", "", {}, marks=pytest.mark.soak),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_equal(
    monkeypatch: pytest.MonkeyPatch, file: Path, planted: str, options: dict[str, object]
) -> None:
    result = run(monkeypatch, file, planted, **options)
    assert result.equal, result.findings
    assert result.steps == 3 and result.compared > 0
    assert max(result.worst.values()) <= result.tolerance


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.soak
def test_a_hanging_and_a_dying_rank_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(forked_children, "MODULES", ())  # command lines are looked at below
    late = "def loss(model, x):\n    if second: time.sleep(600)\n    return model(x).sum()\n"
    with pytest.raises(RankError, match=r"rank 1 of 2 .* hangs: .* step 0: loss\(\)"):
        check(CheckSettings(file=write(tmp_path, late), timeout_s=8))
    dead = (
        "def loss(model, x):\n    if second: os.kill(os.getpid(), 9)\n    return model(x).sum()\n"
    )
    with pytest.raises(RankError, match=r"rank 1 of 2 .* killed by SIGKILL .* step 0: loss\(\)"):
        check(CheckSettings(file=write(tmp_path, dead)))
    wrong = "def loss(model, x):\n    if second: raise KeyError('x')\n    return model(x).sum()\n"
    with pytest.raises(ConfigError, match=r"rank 1: .*step.py, line 15, in loss: KeyError: 'x'"):
        check(CheckSettings(file=write(tmp_path, wrong)))
    commands = [_command(place) for place in Path("/proc").glob("[0-9]*")]
    assert not [command for command in commands if str(tmp_path) in command]
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["step.py"]


def _command(place: Path) -> str:
    try:
        return (place / "cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return ""


@pytest.mark.multi
@pytest.mark.slow
def test_a_random_step_is_not_blamed_on_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROP", "1")
    file = write(tmp_path, "def loss(model, x):\n    return model(x).sum()\n")
    with pytest.raises(ConfigError, match=r"is not reproducible.* dropout is on in 1"):
        check(CheckSettings(file=file))
