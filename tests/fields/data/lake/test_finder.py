"""Containment: brute force agrees, no sieve loses a true edge, and hostile tables are reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.fields.data.lake import ContainmentFinder, open_lake
from shoal.fields.data.lake.content import rows_for
from shoal.fields.data.lake.footers import may_contain
from shoal.fields.data.lake.queries import LakeQueries
from shoal.fields.data.lake.schema_graph import schema_edges
from shoal.fields.data.lake.tables import Lake


def written(place: Path, **tables: Any) -> Lake:
    for name, table in tables.items():
        table = table if isinstance(table, pa.Table) else pa.table(table)
        pq.write_table(table, place / f"{name}.parquet", row_group_size=50)
    return open_lake(str(place))


def named(lake: Lake, edges: Any) -> set[tuple[str, str]]:
    names = [table.name.removesuffix(".parquet") for table in lake.tables]
    return {(names[u], names[v]) for u, v in edges}


def key(value: Any) -> Any:
    """A value such that equal bits are equal."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else (value, math.copysign(1, value))
    return value


def truth(place: Path, lake: Lake, *, bag: bool = False) -> set[tuple[str, str]]:
    """All containments, by sets of rows in Python."""
    result = set()
    tables = {}
    for table in lake.tables:
        whole = pq.read_table(table.path)
        names = [name.strip().casefold() for name in whole.schema.names]
        tables[table.name.removesuffix(".parquet")] = whole.rename_columns(names)
    for one, parent in tables.items():
        for other, child in tables.items():
            names = child.schema.names
            if one == other or not set(names) <= set(parent.schema.names):
                continue
            rows = [
                sorted(
                    repr(tuple(key(v) for v in row.values())) for row in t.select(names).to_pylist()
                )
                for t in (parent, child)
            ]
            if bag:
                left = list(rows[0])
                holds = all(row in left and not left.remove(row) for row in rows[1])  # type: ignore[func-returns-value]
            else:
                holds = set(rows[1]) <= set(rows[0])
            if holds:
                result.add((one, other))
    return result


# ---------------------------------------------------------------------------- schemas


@settings(max_examples=100, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 7), max_size=6), max_size=25))
def test_no_edge_between_schemas_is_lost(schemas: list[frozenset[int]]) -> None:
    expected = {
        (u, v)
        for u, parent in enumerate(schemas)
        for v, child in enumerate(schemas)
        if u != v and child <= parent
    }
    found = schema_edges(schemas).edges
    assert set(found) == expected
    assert len(found) == len(expected)


def test_schemas_of_more_than_a_word() -> None:
    wide = frozenset(range(200))
    found = schema_edges([wide, wide - {150}, frozenset({3, 199}), frozenset({3, 200})])
    assert set(found.edges) == {(0, 1), (0, 2), (1, 2)}


def test_groups_spare_pairs() -> None:
    """Families without a common column are not compared with each other, but with its centers."""
    schemas = [
        frozenset((family, at) for at in range(1 + size))
        for family in range(20)
        for size in range(10)
    ]
    result = schema_edges(schemas)
    assert len(result.edges) == 20 * 45
    assert result.tested < 200 * 199 / 8


# ---------------------------------------------------------------------------- brute force


def grown(place: Path, count: int = 60) -> Lake:
    """Tables that grow from two, with ties, nulls, NaN and near-misses."""
    draw = np.random.default_rng(5)
    n = 80
    score = draw.integers(0, 9, n).astype(float)
    score[::17] = np.nan
    tables = [
        pa.table(
            {
                "id": pa.array(np.arange(n)),
                "word": pa.array([None if x % 11 == 0 else f"w{x % 23}" for x in range(n)]),
                "score": pa.array(score, from_pandas=False),
                "flag": pa.array(draw.integers(0, 2, n).astype(bool)),
            }
        ),
        pa.table({"id": pa.array(np.arange(50, dtype=np.int32)), "code": pa.array(range(50))}),
    ]
    while len(tables) < count:
        table = tables[draw.integers(len(tables))]
        way = draw.integers(4)
        if way == 0:
            some = sorted(draw.permutation(table.num_columns)[: draw.integers(1, 4)].tolist())
            table = table.select(some)
        elif way == 1 and table.num_rows > 3:
            table = table.take(draw.permutation(table.num_rows)[: table.num_rows // 2])
        elif way == 2:
            same = [one for one in tables if one.schema == table.schema]
            table = pa.concat_tables([table, same[draw.integers(len(same))]])
            table = table.slice(0, 160)
        else:
            at = int(draw.integers(table.num_rows))
            rows = table.to_pylist()
            name = table.schema.names[0]
            rows[at][name] = rows[int(draw.integers(table.num_rows))][name]
            table = pa.Table.from_pylist(rows, schema=table.schema)
        tables.append(table)
    return written(place, **{f"t{at:02}": table for at, table in enumerate(tables)})


@pytest.mark.slow
@pytest.mark.parametrize("semantics", ["set", "bag"])
def test_sixty_tables_as_by_brute_force(tmp_path: Path, semantics: Any) -> None:
    lake = grown(tmp_path)
    expected = truth(tmp_path, lake, bag=semantics == "bag")
    assert len(expected) > 60
    full = ContainmentFinder(semantics=semantics, verify="full").find(lake)
    assert named(lake, full.edges) == expected
    assert full.exact
    for seed in range(3):
        sampled = ContainmentFinder(semantics=semantics, seed=seed, columns=1, rows=2).find(lake)
        assert named(lake, sampled.edges) >= expected
        assert not sampled.exact
    left = [stage.edges for stage in full.stages]
    assert left == sorted(left, reverse=True)
    assert full.bytes_read > sampled.bytes_read > 0


def test_more_rows_find_more(tmp_path: Path) -> None:
    """A child that lacks a twentieth of its rows passes 90 sampled rows once in a hundred times."""
    assert rows_for(0.05, 0.01) == 90
    parent = pa.table({"x": pa.array(range(2000))})
    # Not beyond the parent's least and greatest, so that only rows tell.
    child = pa.table({"x": pa.array([*range(950), *(0.5 + x for x in range(50))])})
    parent = pa.table({"x": parent.column(0).cast(pa.float64())})
    lake = written(tmp_path, parent=parent, child=child)
    passed = sum(
        ("parent", "child") in named(lake, ContainmentFinder(rows=90, seed=s).find(lake).edges)
        for s in range(25)
    )
    assert passed <= 3


# ---------------------------------------------------------------------------- values


def test_null_nan_and_zero(tmp_path: Path) -> None:
    def floats(*values: Any) -> pa.Table:
        return pa.table({"x": pa.array(values, pa.float64(), from_pandas=False)})

    nan = float("nan")
    lake = written(
        tmp_path,
        all=floats(1.0, None, nan, 0.0),
        null=floats(None),
        nan=floats(nan),
        zero=floats(0.0),
        negative=floats(-0.0),
        both=floats(0.0, -0.0),
        empty=floats(),
    )
    found = named(lake, ContainmentFinder(verify="full").find(lake).edges)
    assert found == truth(tmp_path, lake)
    assert ("all", "null") in found
    assert ("all", "nan") in found
    assert ("all", "zero") in found
    assert ("all", "negative") not in found
    assert ("both", "negative") in found
    assert {child for parent, child in found if parent == "empty"} == set()
    assert {parent for parent, child in found if child == "empty"} == {
        "all",
        "null",
        "nan",
        "zero",
        "negative",
        "both",
    }


def test_types_that_can_be_compared(tmp_path: Path) -> None:
    values = [1, 2, 3]
    lake = written(
        tmp_path,
        int32={"x": pa.array(values, pa.int32())},
        int64={"x": pa.array([*values, 4], pa.int64())},
        uint64={"x": pa.array([*values, 2**63 + 1], pa.uint64())},
        text={"x": pa.array(["1", "2", "3"])},
        float={"x": pa.array([1.0, 2.0, 3.0])},
        large={"x": pa.array(["1", "2", "3", "4"], pa.large_string())},
        words={"x": pa.array(["1", "2"]).dictionary_encode()},
        lists={"x": pa.array([[1], [2, 3]])},
        more={"x": pa.array([[1], [2, 3], []])},
    )
    result = ContainmentFinder(verify="full").find(lake)
    assert named(lake, result.edges) == {
        *(("int64", "int32"), ("uint64", "int32"), ("large", "text"), ("large", "words")),
        *(("text", "words"), ("more", "lists")),
    }
    clashes = [text for _, text in result.problems]
    assert any(
        "column 'x' is string in text.parquet and int32 in int32.parquet" in text
        for text in clashes
    )
    assert ContainmentFinder(types=True).find(lake).problems == []


def test_names_are_normalized(tmp_path: Path) -> None:
    lake = written(
        tmp_path,
        parent={"ID": pa.array([1, 2]), " Word.x ": pa.array(["a", "b"])},
        child={"id": pa.array([2]), "word.X": pa.array(["b"])},
    )
    assert named(lake, ContainmentFinder(verify="full").find(lake).edges) == {("parent", "child")}


def test_quotes_in_names(tmp_path: Path) -> None:
    place = tmp_path / "it's"
    place.mkdir()
    lake = written(place, a={'x"y': pa.array([1, 2])}, b={'x"y': pa.array([1])})
    assert named(lake, ContainmentFinder(verify="full").find(lake).edges) == {("a", "b")}


# ---------------------------------------------------------------------------- footers


def test_footers_prune_only_what_they_know(tmp_path: Path) -> None:
    low, high = {"x": pa.array([1, 5])}, {"x": pa.array([2, 9])}
    lake = written(tmp_path, low=low, high=high, some={"x": pa.array([None, 3])})
    low_, high_, some = lake.tables[1], lake.tables[0], lake.tables[2]
    assert [table.name for table in (low_, high_, some)] == [
        "low.parquet",
        "high.parquet",
        "some.parquet",
    ]
    assert not may_contain(low_, high_, "set")
    assert not may_contain(low_, some, "set")  # it has no null
    pq.write_table(pa.table(high), tmp_path / "high.parquet", write_statistics=False)
    unknown = open_lake(str(tmp_path)).tables[0]
    assert may_contain(low_, unknown, "set")
    assert may_contain(unknown, low_, "set")
    repeated = written(tmp_path, twice={"x": pa.array([1, 1, 5])}).tables[-1]
    assert may_contain(low_, repeated, "set")
    assert not may_contain(low_, repeated, "bag")


def test_a_dot_in_a_name_is_no_nested_column(tmp_path: Path) -> None:
    nested = pa.array([{"x": 1, "y": [5]}])
    lake = written(tmp_path, a={"w.x": pa.array([-9]), "w": pa.array([2]), "s": nested, "z": [3]})
    columns = lake.tables[0].columns
    assert [columns[name].low for name in ("w.x", "w", "s", "z")] == [-9, 2, None, 3]
    assert min(column.num_bytes for column in columns.values()) > 0
    whole = lake.tables[0]
    assert whole.bytes_of(["s"]) > whole.bytes_of(["w"])


def test_text_that_may_be_cut_short_prunes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = written(tmp_path, a={"x": pa.array(["b", "c"])}, b={"x": pa.array(["a", "c"])})
    assert lake.tables[0].columns["x"].low == "b"
    monkeypatch.setattr("shoal.fields.data.lake.tables._WHOLE", "another writer")
    again = open_lake(str(tmp_path)).tables[0].columns["x"]
    exact = getattr(
        pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0).statistics,
        "is_min_value_exact",
        None,
    )
    assert (again.low is None) == (exact is not True)


# ---------------------------------------------------------------------------- hostile


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    written(tmp_path, a={"x": pa.array([1, 2])}, b={"x": pa.array([1])}, c={"x": pa.array([1])})
    whole = (tmp_path / "c.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[:-20])
    (tmp_path / "d.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "e.csv").write_text("x\n1\n")
    twice = pa.table([pa.array([1]), pa.array([1])], names=["x", "X "])
    pq.write_table(twice, tmp_path / "f.parquet")
    pq.write_table(pa.table({"x": pa.array([1])}), tmp_path / "g*.parquet")
    lake = open_lake(str(tmp_path))
    result = ContainmentFinder(verify="full").find(lake)
    assert named(lake, result.edges) == {("a", "b")}
    said = dict(result.problems)
    assert set(said) == {"c.parquet", "d.parquet", "e.csv", "f.parquet", "g*.parquet"}
    assert "footer cannot be read" in said["c.parquet"]
    assert "no Parquet file" in said["e.csv"]
    assert "two columns are called 'x'" in said["f.parquet"]
    assert "stands for several files" in said["g*.parquet"]


def test_data_that_is_damaged_behind_its_footer(tmp_path: Path) -> None:
    lake = written(tmp_path, a={"x": pa.array(range(1000))}, b={"x": pa.array(range(500))})
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:200] = b"\xff" * 196
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    with pytest.raises(DataError, match="cannot be compared"):
        ContainmentFinder(verify="full").find(lake)


def test_what_is_no_lake(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a directory of this machine"):
        open_lake("s3://bucket/lake")
    with pytest.raises(DataError, match="no such file"):
        open_lake(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="rows = 0: expected a number from 1 on"):
        ContainmentFinder(rows=0)


def test_sieves_can_be_replaced(tmp_path: Path) -> None:
    lake = written(tmp_path, a={"x": pa.array([1, 2])}, b={"x": pa.array([1])})

    def none(queries: LakeQueries, edges: Any, tick: Any) -> list[Any]:
        tick(1.0, "nothing")
        return []

    result = ContainmentFinder(sieves={"none": none}).find(lake)
    assert result.edges == []
    assert [stage.name for stage in result.stages] == ["schemas", "none"]
