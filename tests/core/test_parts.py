"""Parts and their tables, with a real third-party part behind a real entry point."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MultipleOf

from shoal.core import parts
from shoal.core.bounds import allowed
from shoal.core.errors import ConfigError, UnknownKeyError, UnknownPartError, require
from shoal.core.parts import Choice, PartTable, lazy_names, options_of, part


@part
class Topk:
    """A part of these tests.

    Args:
        ratio: share kept.
        rounds: how often.
    """

    ratio: float = 0.01
    rounds: int = 1


@part
class Needy:
    """A part with an option that must be given.

    Args:
        path: where.
    """

    path: str


@part
class Bounded:
    """A part whose options have bounds, and a rule between two of them.

    Args:
        port: of both sides.
        least: from below.
        rate: without an end.
        share: open below.
        sizes: a bound of each.
        steps: a number or a word.
        width: in units.
    """

    port: Annotated[int, Ge(1), Le(65535)] = 80
    least: Annotated[int, Ge(2)] | None = None
    rate: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    sizes: tuple[Annotated[int, Ge(4)], ...] = (4,)
    steps: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    width: Annotated[int, MultipleOf(64), Ge(64)] = 64

    def __post_init__(self) -> None:
        require(self.port % self.sizes[0] == 0, "bounded.port", self.port, expected="a multiple")


TABLE = PartTable(
    "compressor",
    {
        "topk": f"{__name__}:Topk",
        "needy": f"{__name__}:Needy",
        "bounded": f"{__name__}:Bounded",
    },
)


def test_part_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topk().ratio = 0.5
    with pytest.raises(TypeError):
        Topk(0.5)
    assert options_of(Topk) == ("ratio", "rounds")


def test_both_spellings_build_the_same() -> None:
    assert TABLE.build("topk") == TABLE.build({"name": "topk"}) == Topk()
    assert TABLE.build({"name": "topk", "ratio": 0.5}) == Topk(ratio=0.5)
    assert TABLE.build(Choice(name="topk", options={"ratio": 0.5})) == Topk(ratio=0.5)


@pytest.mark.parametrize("given", ["topk", {"name": "topk", "ratio": 0.5}])
def test_choice_writes_what_it_read(given: Any) -> None:
    choice = Choice.model_validate(given)
    assert choice.model_dump(mode="json") == given
    assert Choice.model_validate(choice.model_dump(mode="json")) == choice


def test_choice_is_readable() -> None:
    assert str(Choice(name="topk")) == "topk"
    assert str(Choice(name="topk", options={"ratio": 0.5, "rounds": 2})) == (
        "topk(ratio=0.5, rounds=2)"
    )


def test_spell_is_the_inverse_of_build() -> None:
    for instance in (Topk(), Topk(ratio=0.5), Needy(path="x")):
        assert TABLE.build(TABLE.spell(instance)) == instance
    assert TABLE.spell(Topk()) == Choice(name="topk")
    with pytest.raises(UnknownPartError, match="object is in no table"):
        TABLE.spell(object())


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ("topq", UnknownPartError, "expected one of topk, needy, bounded; did you mean 'topk'"),
        ({"name": "topk", "ratoi": 1}, UnknownKeyError, "did you mean 'ratio'"),
        ({"name": "topk", "ratio": "x"}, ConfigError, r"compressor\.topk\.ratio = 'x'"),
        ({"name": "needy"}, ConfigError, r"compressor\.needy\.path: missing"),
        ({"nmae": "topk"}, ConfigError, "compressor"),
        (3, ConfigError, "compressor"),
    ],
)
def test_bad_choices(choice: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TABLE.build(choice)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("port", 0, "port = 0: expected 1 to 65535"),
        ("port", 65536, "port = 65536: expected 1 to 65535"),
        ("least", 1, "least = 1: expected at least 2"),
        ("rate", 0, "rate = 0: expected above 0, finite"),
        ("rate", math.inf, "rate = inf: expected above 0, finite"),
        ("rate", math.nan, "rate = nan: expected above 0, finite"),
        ("share", 0.0, "share = 0.0: expected in (0, 1]"),
        ("sizes", (4, 3), "sizes.1 = 3: expected at least 4"),
        ("sizes", (0,), "sizes.0 = 0: expected at least 4"),  # before the rule divides by it
        ("steps", 0, "steps = 0: expected at least 1"),
        ("width", 96, "width = 96: expected a multiple of 64, at least 64"),
        ("width", 0, "width = 0: expected a multiple of 64, at least 64"),
    ],
)
def test_bounds_of_options(option: str, value: Any, message: str) -> None:
    """A part that is chosen and one that is constructed raise the same."""
    with pytest.raises(ConfigError, match="^" + re.escape(f"job.compressor.bounded.{message}")):
        TABLE.build({"name": "bounded", option: value}, where="job.compressor")
    with pytest.raises(ConfigError, match="^" + re.escape(f"Bounded.{message}")):
        Bounded(**{option: value})
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(Bounded(), **{option: value})


def test_values_within_their_bounds_are_taken() -> None:
    given = {"port": 4096, "least": 2, "rate": 1e300, "share": 1, "sizes": (4, 8), "steps": "auto"}
    assert TABLE.build({"name": "bounded", **given}) == Bounded(**given)
    assert Bounded(steps=3).steps == 3
    assert Bounded(least=None).least is None
    with pytest.raises(ConfigError, match=r"bounded.port = 3: expected a multiple"):
        Bounded(port=3)


def test_what_is_allowed_in_words() -> None:
    assert allowed(Bounded) == {
        "port": "1 to 65535",
        "least": "at least 2",
        "rate": "above 0, finite",
        "share": "in (0, 1]",
        "sizes": "at least 4",
        "steps": "at least 1",
        "width": "a multiple of 64, at least 64",
    }


def test_message_of_a_registered_part_names_kind_and_part() -> None:
    from shoal.fields.data.cluster.clara import CLARA

    with pytest.raises(ConfigError, match=r"^clusterer\.clara\.samples = 0: expected at least 1"):
        CLARA(samples=0)


def test_where_names_the_place_in_the_config() -> None:
    with pytest.raises(UnknownPartError, match=r"^job\.sync = 'x'"):
        TABLE.build("x", where="job.sync")


def test_table_is_a_mapping() -> None:
    assert list(TABLE) == ["topk", "needy", "bounded"]
    assert len(TABLE) == 3
    assert TABLE["topk"] == f"{__name__}:Topk"
    with pytest.raises(KeyError):
        TABLE["nothing"]


def test_unknown_kind() -> None:
    with pytest.raises(UnknownPartError, match="expected one of job, study, sink, pool"):
        parts.table("sinks")


def install(site: Path, entry: str, module: str) -> None:
    """A distribution as pip leaves it: a module and a dist-info with an entry point."""
    (site / "thirdparty_sink.py").write_text(textwrap.dedent(module))
    info = site / "thirdparty_sink-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty-sink\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[shoal.parts]\n{entry}\n")
    (info / "RECORD").write_text("")


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


MODULE = """
    from shoal.core.parts import part

    @part
    class Lines:
        '''A sink of a third party.

        Args:
            prefix: put before each line.
        '''

        prefix: str = "> "

        def open(self):
            return Writer(self)

    class Writer:
        def __init__(self, sink): self.sink = sink
        def event(self, record, labels): print(self.sink.prefix + record["kind"])
        def counter(self, name, total, labels): pass
        def gauge(self, name, value, labels): pass
        def close(self): pass
"""


def test_third_party_part_is_used_like_our_own(tmp_path: Path) -> None:
    install(tmp_path, "sink.lines = thirdparty_sink:Lines", MODULE)
    done = python(
        tmp_path,
        """
        import json, sys
        from shoal.core.meter import SINKS, Meter
        names = list(SINKS)
        assert "thirdparty_sink" not in sys.modules  # lazy, like our own
        sink = SINKS.build({"name": "lines", "prefix": "* "})
        with Meter([sink]) as meter:
            meter.event("hello")
        print(json.dumps([names, SINKS.spell(sink).model_dump(mode="json"), "lines" in SINKS]))
        try:
            SINKS.build({"name": "lines", "prefx": ""})
        except Exception as error:
            print(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    said, listed, error = done.stdout.splitlines()
    assert said == "* hello"
    names, spelled, known = json.loads(listed)
    assert names == [*parts.table("sink"), "lines"]
    assert (spelled, known) == ({"name": "lines", "prefix": "* "}, True)
    assert "did you mean 'prefix'" in error


def test_third_party_part_cannot_take_our_names(tmp_path: Path) -> None:
    install(tmp_path, "sink.jsonl = thirdparty_sink:Lines", MODULE)
    done = python(
        tmp_path, "from shoal.core.meter import SINKS; print(SINKS['jsonl'], len(list(SINKS)))"
    )
    assert done.stdout.split() == ["shoal.core.meter.jsonl:JsonlSink", "5"], done.stderr


@pytest.mark.parametrize("entry", ["lines = thirdparty_sink:Lines", "sinks.x = thirdparty_sink:X"])
def test_entry_point_of_no_kind_is_named(tmp_path: Path, entry: str) -> None:
    install(tmp_path, entry, MODULE)
    done = python(
        tmp_path,
        """
        from shoal.core.errors import ConfigError
        from shoal.core.meter import SINKS
        try:
            list(SINKS)
        except ConfigError as error:
            print(error)
        """,
    )
    assert "expected <kind>.<name> with a kind of job, study, sink, pool" in done.stdout, (
        done.stderr
    )


def test_lazy_names_import_what_they_name_and_nothing_else() -> None:
    get = lazy_names("shoal.core", Choice="parts", require="errors")
    assert get("Choice") is Choice and get("require") is require
    with pytest.raises(AttributeError, match=r"'shoal\.core' has no attribute 'Choices'"):
        get("Choices")
