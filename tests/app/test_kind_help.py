"""The help of ``shoal plan KIND`` and ``shoal run KIND``: the example runs, the data are named."""

import shlex
from typing import Any

import pytest

from shoal.api.jobs import read_job
from shoal.app.commands.jobs import example_command, kind_flags, subject_help
from shoal.core.files import parse_yaml
from shoal.ir.job_kind import kinds

KINDS = sorted(kinds())


@pytest.mark.parametrize("name", KINDS)
def test_the_example_of_the_help_is_the_example_of_the_kind(name: str) -> None:
    kind = kinds()[name]
    text = example_command("run", name, kind)
    assert all(len(line) <= 78 for line in text.replace(r"\\", "").splitlines())
    # Markdown ends a line by three backslashes, a shell by one.
    words = shlex.split(text.replace(r"\\", "").replace("\\\n", " "))
    assert words[:3] == ["shoal", "run", name]
    flags = {f"--{one.name.replace('_', '-')}": one for one in kind_flags(kind)}
    values: dict[str, Any] = {}
    sets = []
    for word, given in zip(words[4::2], words[5::2], strict=True):
        if word == "--set":
            sets.append(given)
        else:
            read = flags[word].read
            values[flags[word].path] = parse_yaml(given, word) if read is None else read(given)
    job = read_job(words[3], kind, None, values, sets=sets, environment={}).value
    assert job == kind.job_type.model_validate(kind.example)


@pytest.mark.parametrize("name", KINDS)
def test_the_help_says_what_the_first_argument_can_be(name: str) -> None:
    kind = kinds()[name]
    text = subject_help(kind)
    assert "``" not in text and "YAML" in text
    # What the example gives is named.
    word = kind.example[kind.subject]
    word = word["name"] if isinstance(word, dict) else word
    assert len(text) > 60 or word.partition(":")[0] in text
