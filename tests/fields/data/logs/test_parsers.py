"""Parsers of logs: what they find, in any batches, and that lines are of their templates."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import table
from shoal.fields.data.logs import DrainParser
from shoal.fields.data.logs.formats import GENERAL
from shoal.fields.data.logs.parsers.spell import common, merged
from shoal.fields.data.logs.reading import masked
from shoal.fields.data.logs.templates import parsed_table, substituted

PARSERS = list(table("log_parser"))
LINES = [
    *(f"connection from 10.0.0.{at}:80 closed after {at} s" for at in range(40)),
    *(f"user {name} logged in" for name in ("ann", "bob", "eve", "dan") for _ in range(5)),
    *(f"job {at} of queue q{at % 3} finished with status {at % 2}" for at in range(30)),
    "shutting down",
    "shutting down",
]


@pytest.mark.parametrize("name", PARSERS)
def test_lines_that_differ_in_numbers_are_of_one_template(name: str) -> None:
    result = parsed_table(table("log_parser").build(name), LINES, GENERAL)
    ids = result["template_id"].to_pylist()
    assert len(set(ids[:40])) == 1
    assert len({*ids[:40], *ids[60:90], *ids[90:]}) >= 3
    assert ids[90] == ids[91]
    assert set(ids[:40]).isdisjoint(ids[90:])


@pytest.mark.parametrize("name", PARSERS)
@given(
    rows=st.lists(
        st.lists(
            st.sampled_from(["get", "put", "12", "/a/b/c", "x", "10.0.0.1", "  "]), max_size=6
        ).map(" ".join),
        min_size=1,
        max_size=30,
    ),
    cut=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_batches_do_not_matter_and_lines_are_of_their_templates(
    name: str, rows: list[str], cut: int
) -> None:
    parser = table("log_parser").build(name)
    whole = parsed_table(parser, rows, GENERAL)
    miner = parser.open()
    clean = masked(pa.array([row.encode() for row in rows], pa.large_binary()), GENERAL)
    groups = np.concatenate([miner.add(clean[:cut]), miner.add(clean[cut:])])
    mined = miner.finish()
    texts = [mined.templates[at].decode() for at in mined.ids[groups]]
    assert texts == whole["template"].to_pylist()
    for row, text, values in zip(rows, texts, whole["parameters"].to_pylist(), strict=True):
        back = substituted(text.encode(), [value.encode() for value in values]).decode()
        assert back.split() == row.split()


def test_drain_by_hand() -> None:
    """Depth, digits and the threshold of similarity, on the paper's kind of lines."""
    parser = DrainParser(depth=4, similarity=0.5)
    found = parser.parse(["send a b", "send a c", "send d e", "get 1 x", "7up is x"], masks=())
    assert found["template"].to_pylist() == [
        "send a <*>",
        "send a <*>",
        "send d e",
        "get 1 x",
        "7up is x",
    ]
    # A similarity of 1/3 is enough for the third; the first token always tells apart.
    loose = DrainParser(similarity=0.3).parse(
        ["send a b", "send a c", "send d e", "get a b"], masks=()
    )
    assert loose["template"].to_pylist() == ["send <*> <*>"] * 3 + ["get a b"]
    # With a digit the first token goes to <*>, and lines meet there.
    digits = DrainParser(similarity=0.5).parse(["1x is up", "2x is up"], masks=())
    assert digits["template"].to_pylist() == ["<*> is up"] * 2


def test_lists_of_any_length_are_of_one_template() -> None:
    lines = ["delete blk_1", "delete blk_2 blk_3", "delete blk_4 blk_5 blk_6"]
    assert set(DrainParser().parse(lines)["template"].to_pylist()) == {"delete <*>"}
    assert DrainParser().parse(lines)["parameters"].to_pylist()[2] == ["blk_4 blk_5 blk_6"]
    apart = DrainParser(merge_runs=False).parse(lines)["template"].to_pylist()
    assert apart == ["delete <*>", "delete <*> <*>", "delete <*> <*> <*>"]


def test_spell_by_hand() -> None:
    assert common([b"a", b"b", b"c"], [b"b", b"x", b"c"]) == [b"b", b"c"]
    assert merged([b"a", b"b", b"c"], [b"b", b"x", b"c"]) == [b"<*>", b"b", b"<*>", b"c"]
    spell = table("log_parser").build("spell")
    found = parsed_table(spell, ["open file a b c now", "open file z now"], ())
    assert found["template"].to_pylist() == ["open file <*> now"] * 2
    assert found["parameters"].to_pylist() == [["a b c"], ["z"]]


def test_iplom_parts_by_pairs() -> None:
    """Two words that go together one to one are two templates, whatever stands around them."""
    pairs = (("start", "disk"), ("stop", "fan"))
    lines = [f"{'ab'[at % 2]} {verb} {noun} {at}" for at in range(8) for verb, noun in pairs]
    found = parsed_table(table("log_parser").build("iplom"), lines, ())
    assert set(found["template"].to_pylist()) == {
        f"{letter} {verb} {noun} <*>" for letter in "ab" for verb, noun in pairs
    }


def test_a_frequency_tree_ends_where_words_are_many() -> None:
    tree = table("log_parser").build({"name": "frequency_tree", "max_children": 3})
    found = parsed_table(tree, [f"user {name} left" for name in "abcdefgh"], ())
    assert set(found["template"].to_pylist()) == {"user <*> left"}


def test_bytes_that_are_no_text_and_empty_lines() -> None:
    found = DrainParser().parse([b"got \xff\xfe 5", b"", "", "  ", "got \udcff 6"])
    assert found["template"].to_pylist() == ["got \ufffd\ufffd <*>", "", "", "", "got \ufffd <*>"]
    assert DrainParser().parse([]).num_rows == 0


def test_bad_input() -> None:
    with pytest.raises(DataError, match="line 1: int"):
        DrainParser().parse(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="masks"):
        DrainParser().parse(["a"], masks=["("])
    with pytest.raises(ConfigError, match="depth"):
        DrainParser(depth=2)
