"""Layers, provenance, spelling hints and the schema of configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pytest
from pydantic import PositiveInt, model_validator

from shoal.core import parts
from shoal.core.config import RESERVED, Kind, Value, parse, resolve
from shoal.core.errors import ConfigError, UnknownKeyError, UnknownPartError, require
from shoal.core.parts import Choice, PartTable, part


@part
class Sgd:
    """A part to choose.

    Args:
        lr: learning rate.
    """

    lr: float = 0.1

    def __post_init__(self) -> None:
        """Check the option."""
        require(self.lr > 0, "optimizer.sgd.lr", self.lr, expected="above 0")


@part
class Lion:
    """Another one.

    Args:
        beta: momentum.
    """

    beta: float = 0.9


TABLE = PartTable("optimizer", {"sgd": f"{__name__}:Sgd", "lion": f"{__name__}:Lion"})


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.KINDS, "optimizer", f"{__name__}:TABLE")


class Parallel(Value):
    dp: PositiveInt = 1
    tp: PositiveInt = 1


class Job(Value):
    name: str = "run"
    steps: PositiveInt | None = None
    parallel: Parallel = Parallel()
    optimizer: Annotated[Choice, Kind("optimizer")] = Choice(name="sgd")
    RESERVED: ClassVar[int] = 0


def yaml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_each_layer_covers_the_one_before(tmp_path: Path) -> None:
    path = yaml(tmp_path, "parallel: {dp: 2, tp: 2}\nsteps: 2\nname: file\n")
    layers: dict[str, Any] = {
        "file": path,
        "environment": {"SHOAL_PARALLEL__DP": "3", "SHOAL_NAME": "env", "SHOAL_STEPS": "3"},
        "flags": {"parallel.dp": 4, "name": "flag", "steps": None},
        "sets": ["parallel.dp=5"],
    }
    value = resolve(Job, **layers).value
    assert (value.parallel.dp, value.name, value.steps, value.parallel.tp) == (5, "flag", 3, 2)
    for dropped, expected in (("sets", 4), ("flags", 3), ("environment", 2), ("file", 1)):
        layers[dropped] = () if dropped == "sets" else {} if dropped != "file" else None
        assert resolve(Job, **layers).value.parallel.dp == expected


def test_every_leaf_says_where_it_came_from(tmp_path: Path) -> None:
    resolved = resolve(
        Job,
        file=yaml(tmp_path, "steps: 7\nparallel: {tp: 2}\n"),
        environment={"SHOAL_NAME": "env"},
        flags={"parallel.dp": 2},
        sets=["optimizer={name: sgd, lr: 1e-2}"],
    )
    reasons = {path: (value, reason) for path, value, reason in resolved.lines()}
    assert reasons == {
        "name": ("env", "environment SHOAL_NAME"),
        "steps": ("7", "file job.yaml"),
        "parallel.dp": ("2", "flag for parallel.dp"),
        "parallel.tp": ("2", "file job.yaml"),
        "optimizer.name": ("sgd", "--set optimizer"),
        "optimizer.lr": ("0.01", "--set optimizer"),
    }
    assert ("steps", "none", "default") in list(resolve(Job, environment={}).lines())
    changed = resolved.replace({"steps": 9}, "probed: a short run")
    assert changed.value.steps == 9
    assert ("steps", "9", "probed: a short run") in list(changed.lines())


def test_option_of_a_part_chosen_in_short_spelling(tmp_path: Path) -> None:
    path = yaml(tmp_path, "optimizer: sgd\n")
    value = resolve(Job, file=path, environment={}, sets=["optimizer.lr=0.5"]).value
    assert value.optimizer == Choice(name="sgd", options={"lr": 0.5})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"sets": ["paralel.dp=2"]}, r"--set paralel\.dp.*did you mean 'parallel'"),
        (
            {"sets": ["parallel.dq=2"]},
            r"^--set parallel\.dq: parallel\.dq: no such key; did you mean 'dp'",
        ),
        ({"environment": {"SHOAL_STEP": "2"}}, "environment SHOAL_STEP.*did you mean 'steps'"),
        ({"flags": {"nmae": "x"}}, "flag for nmae.*did you mean 'name'"),
        ({"sets": ["optimizer={name: sgd, rl: 1}"]}, "did you mean 'lr'"),
    ],
)
def test_unknown_keys_name_layer_and_nearest_spelling(layers: Any, message: str) -> None:
    with pytest.raises(UnknownKeyError, match=message):
        resolve(Job, **{"environment": {}, **layers})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("paralel: {dp: 1}", "did you mean 'parallel'"),
        ("parallel: {dq: 1}", "did you mean 'dp'"),
        ("steps: 0", "steps = 0: expected above 0"),
        ("steps: .inf", "steps"),
        ("[1, 2]", "expected a mapping"),
        ("steps: 1\nsteps: 2", "the key 'steps' stands twice"),
        ("steps: [1", "line"),
        ("optimizer: {name: sgd, lr: -1}", "expected above 0"),
        ("optimizer: {lr: 1}", "optimizer"),
        ("steps: !!python/object/apply:os.system [exit]", "line 1"),
    ],
)
def test_bad_file_names_itself(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Job, file=yaml(tmp_path, text), environment={})
    assert "job.yaml" in str(caught.value)


def test_unknown_part_lists_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownPartError, match=r"expected one of sgd, lion; did you mean 'lion'"):
        resolve(Job, file=yaml(tmp_path, "optimizer: lino"), environment={})


@pytest.mark.parametrize("word", ["steps", "=3", ""])
def test_set_needs_path_and_value(word: str) -> None:
    with pytest.raises(ConfigError, match="expected path=value"):
        resolve(Job, environment={}, sets=[word])


def test_set_gives_an_option_of_the_default_part() -> None:
    default = Job().optimizer.name
    result = resolve(Job, environment={}, sets=["optimizer.lr=0.5"]).value
    assert (result.optimizer.name, result.optimizer.options) == (default, {"lr": 0.5})
    with pytest.raises(UnknownKeyError, match=rf"optimizer\.{default}\.lrr: no such key"):
        resolve(Job, environment={}, sets=["optimizer.lrr=0.5"])


def test_set_below_a_single_value() -> None:
    with pytest.raises(ConfigError, match="steps is a single value and has no key 'x'"):
        resolve(Job, environment={}, sets=["steps=3", "steps.x=4"])


def test_reserved_variables_are_no_keys() -> None:
    assert resolve(Job, environment=dict.fromkeys(RESERVED, "x")).value == Job()


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (16 * 2**20 + 1)])
def test_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"job\.yaml"):
        resolve(Job, file=path, environment={})


def test_yaml_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    job = Job(steps=3, optimizer=Choice(name="sgd", options={"lr": 3e-4}))
    job.save(path, header="a job\nof two lines")
    assert path.read_text().startswith("# a job\n# of two lines\nname: run\n")
    assert Job.load(path) == job


def test_values_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Job().steps = 3


def test_parse_of_nothing_is_the_default() -> None:
    assert parse(Job, None, where="x") == Job()


def test_json_schema_for_editors() -> None:
    schema = Job.model_json_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    optimizer = schema["properties"]["optimizer"]
    assert optimizer["anyOf"][0] == {"enum": ["sgd", "lion"]}
    by_name = {option["properties"]["name"]["const"]: option for option in optimizer["anyOf"][1:]}
    assert set(by_name["sgd"]["properties"]) == {"name", "lr"}
    assert by_name["lion"]["additionalProperties"] is False


def test_a_base_is_below_every_other_layer() -> None:
    base = Job(name="old", steps=10, parallel=Parallel(dp=4))
    result = resolve(Job, base=base, environment={}, flags={"steps": 20}, sets=["parallel.tp=2"])
    assert result.value == Job(name="old", steps=20, parallel=Parallel(dp=4, tp=2))
    reasons = {path: reason for path, _, reason in result.lines()}
    assert reasons["name"] == reasons["parallel.dp"] == "plan"
    assert reasons["steps"].startswith("flag")
    assert reasons["parallel.tp"].startswith("--set")


def test_what_a_base_leaves_open_stays_open() -> None:
    result = resolve(Job, base=Job(name="old", parallel=Parallel(dp=4)), environment={})
    assert result.value.model_fields_set == {"name", "parallel"}
    assert result.value.parallel.model_fields_set == {"dp"}


class Stored(Value):
    """Either nothing, or a name with its path."""

    name: str = ""
    path: str = ""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.name and not self.path:
            raise ConfigError("path: expected a directory")
        return self


def test_a_later_word_completes_an_earlier_one(tmp_path: Path) -> None:
    words = ["name=medusa", "path=heads"]
    assert resolve(Stored, environment={}, sets=words).value == Stored(name="medusa", path="heads")
    (tmp_path / "job.yaml").write_text("name: medusa")
    result = resolve(Stored, file=tmp_path / "job.yaml", environment={}, sets=words[1:]).value
    assert result.path == "heads"


def test_what_no_word_completes_is_blamed_on_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^--set name: path: expected a directory"):
        resolve(Stored, environment={}, sets=["name=medusa", "name=eagle"])


class Needy(Value):
    data: str
    keep: float = 1.0


def test_what_is_wrong_is_said_before_what_is_missing() -> None:
    with pytest.raises(UnknownKeyError, match=r"^environment SHOAL_KEEEP: keeep: no such key"):
        resolve(Needy, environment={"SHOAL_KEEEP": "1"}, flags={"data": "digits"})
    with pytest.raises(ConfigError, match=r"data: missing"):
        resolve(Needy, environment={"SHOAL_KEEP": "1"})


class Either(Value):
    k: PositiveInt | Literal["auto"] = 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-3, "k = -3: expected above 0, or input should be 'auto'"),
        ("many", "k = 'many': input should be a valid integer"),
    ],
)
def test_a_value_of_several_types_is_named_by_its_key_alone(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(Either, flags={"k": given}, environment={})
    assert message in str(raised.value)
    assert "constrained" not in str(raised.value) and "literal[" not in str(raised.value)
