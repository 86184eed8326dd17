"""``shoal explain``: every part has an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.app.commands.explain import PartCommands, explained
from shoal.core.errors import ConfigError, UnknownPartError
from shoal.core.parts import KINDS, table

RUN = CliRunner()
PARTS = [(kind, name) for kind in KINDS if kind not in ("job", "claim") for name in table(kind)]


def said(*words: str) -> str:
    done = RUN.invoke(app, ["explain", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_all_parts_are_listed() -> None:
    lines = {line.split("  ")[0].strip() for line in said().splitlines()}
    assert {name for _, name in PARTS} <= lines


def test_every_part_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in PARTS:
        command = PartCommands.action(name) if kind == "study" else explained(f"{kind}.{name}")
        assert command.__doc__
        if kind != "study":
            command()
            assert table(kind)[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(table("study")))
def test_a_study_has_help_with_examples(name: str) -> None:
    text = said(name, "--help")
    assert "--picture" in text
    assert "shoal explain" in text


def test_a_part_says_options_traits_and_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no results lie here
    text = said("co2")
    assert "local_updates: workers update independently" in text
    assert "[13] CO2, 2024" in text
    assert "shoal claims run co2" in text
    assert re.search(r"tau +\S+ +at least 1 ", text)


def test_a_kind_lists_its_parts() -> None:
    text = said("shard")
    assert all(name in text for name in table("shard"))


def test_words_that_are_none() -> None:
    for words, message in (
        (("shedule",), "did you mean 'schedule'"),
        (("shard.zero9",), "expected one of replicated"),
    ):
        done = RUN.invoke(app, ["explain", *words])
        assert isinstance(done.exception, UnknownPartError)
        assert message in str(done.exception)


def test_what_a_study_does_not_have_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    picture = tmp_path / "fold.svg"
    done = RUN.invoke(app, ["explain", "fold", "--out", str(tmp_path), "--picture", str(picture)])
    assert isinstance(done.exception, ConfigError)
    assert "--out: this writes no files" in str(done.exception)
    assert not list(tmp_path.iterdir())
    done = RUN.invoke(app, ["explain", "fold", "--pp", "0"])
    assert "explain.fold.pp = 0: expected above 0" in str(done.exception)


def test_a_study_answers_programs() -> None:
    data = json.loads(said("fold", "--rows", "2", "-o", "json"))
    assert len(data) == 2
    assert data[0]["step_s"]["value"] <= data[1]["step_s"]["value"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shoal run ", "drafter"),
        ("shoal plan dr", "drafter"),
        ("shoal explain sc", "schedule"),
        ("shoal run nosuch ", "train"),
        ("shoal explain nosuch ", "fold"),
        ("shoal plan fold ", "serve"),
    ],
)
def test_a_shell_completes(line: str, offered: str) -> None:
    """Kinds and studies are offered; a word before that is none gives no trace."""
    variables = {
        "_SHOAL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = RUN.invoke(app, [], env=variables, prog_name="shoal")
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert offered in done.output.split()
