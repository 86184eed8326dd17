"""``shoal explain tiles`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError, PlanError

FACTS = "cores: 2, vector_bytes: 64, registers: 32, l1_bytes: 49152, l2_bytes: 2097152"
SETS = ["--facts", f"{{{FACTS}}}"]


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["tiles", *map(str, words)])


def solved(*words: object) -> dict[str, Any]:
    done = shoal(*words, "-o", "json")
    assert done.exit_code == 0, done.output
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def test_recurrence_is_cut_over_the_cores() -> None:
    done = shoal("recurrence", "--hidden", 768, "--heads", 12, *SETS)
    assert done.exit_code == 0, done.output
    assert "tiles of recurrence" in done.stdout
    assert "threads that share a head" in done.stdout
    assert "proven optimum in" in done.stdout
    assert solved("--hidden", 768, "--heads", 12, *SETS)["tiles"]["team"] == 1
    assert solved("--hidden", 256, "--heads", 1, *SETS)["tiles"]["team"] == 2


def test_other_kernels_and_machines() -> None:
    linear = solved("linear", "--batch", 4, "--n", 11008, "--k", 4096, *SETS)["tiles"]
    assert linear["depth"] % 128 == 0
    assert linear["rows"] in (2, 4)
    gpu = solved("recurrence", "--machine", "H100", "--dtype", "bf16", "--facts", "{cores: 132}")
    assert gpu["tiles"]["gate_tile"] % 16 == 0


def test_a_system_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("a in 1..10; b in 1..10\na * b == 24\n")
    assert solved(file)["tiles"] == {"a": 8, "b": 3}
    shown = shoal("recurrence", "--system", *SETS).stdout
    file.write_text(shown)
    assert solved(file)["objective"] == solved("recurrence", *SETS)["objective"]


def test_what_cannot_be_is_explained(tmp_path: Path) -> None:
    for words, error, message in (
        (("--hidden", 8192, "--heads", 1, *SETS), PlanError, "no solution: .*in_L2: gates"),
        (("--hidden", 770, *SETS), ConfigError, "expected a multiple of heads = 12"),
        (("--function", "rnn", *SETS), ConfigError, "lstm"),
        (("--dtype", "int8", *SETS), ConfigError, "'fp64', 'fp32' or 'bf16'"),
        (("recurrent",), ConfigError, "expected recurrence, linear, or a file"),
        (("--facts", "{core: 4}"), ConfigError, "did you mean 'cores'"),
    ):
        done = shoal(*words)
        assert isinstance(done.exception, error)
        with pytest.raises(error, match=message):
            raise done.exception
