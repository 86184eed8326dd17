"""OSQ beside brute force, DuckDB, and what its parts promise."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from scipy.optimize import linear_sum_assignment

from shoal.core.errors import ConfigError
from shoal.fields.retrieve.collections.filters import PointFilter, col
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.osq.attributes import quantised
from shoal.fields.retrieve.index.osq.files import load_filter, load_index, load_part, save_index
from shoal.fields.retrieve.index.osq.index import OSQIndex, native
from shoal.fields.retrieve.index.osq.partition import assign, balanced_parts
from shoal.fields.retrieve.index.osq.quantise import allocate_bits, cell_bounds
from shoal.fields.retrieve.index.protocols import VectorIndexError

DIM, ROWS = 20, 4000


def clustered(count, dim=DIM, seed=0):
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((30, dim)) * 2
    spread = np.linspace(0.2, 2, dim)
    rows = centres[draw.integers(0, 30, count)] + draw.standard_normal((count, dim)) * spread
    return rows.astype(np.float32)


def attributes(count, seed=0):
    draw = np.random.default_rng(seed)
    nothing, silent = draw.random((2, count)) < 0.1
    return pa.table(
        {
            "price": pa.array(draw.random(count) * 10, mask=nothing),
            "year": draw.integers(1990, 2020, count),
            "huge": draw.integers(-(2**52), 2**52, count),
            "lang": pa.array(draw.choice(["en", "fr", "de", ""], count), mask=silent),
            "new": draw.random(count) < 0.3,
            "one": np.full(count, 7.0),
            "none": pa.nulls(count, pa.float64()),
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def index():
    made = OSQIndex(4, 7)
    made.build(clustered(ROWS), attributes=attributes(ROWS))
    return made


# Codes


@pytest.mark.parametrize("segment", [8, 16, 32, 64])
def test_packing_and_unpacking_is_the_identity_for_every_layout(segment):
    draw, code, rows = np.random.default_rng(segment), native(), 77
    for _ in range(20):
        bits = draw.integers(1, 9, 30)
        words = np.zeros((-(-int(bits.sum()) // segment), rows), f"u{segment // 8}")
        first = np.concatenate([[0], np.cumsum(bits)])
        columns = [draw.integers(0, 1 << b, rows).astype(np.uint16) for b in bits]
        at = [
            (words.ctypes.data, segment, rows, rows, int(f), int(b))
            for f, b in zip(first, bits, strict=False)
        ]
        for place, column in zip(at, columns, strict=True):
            code.osq_pack(*place, column.ctypes.data)
        for place, column in zip(at, columns, strict=True):
            found = np.empty(rows, np.uint16)
            code.osq_unpack(*place, found.ctypes.data)
            np.testing.assert_array_equal(found, column)


def test_bits_go_to_the_largest_remaining_energy():
    assert allocate_bits(np.array([64.0, 4.0, 1.0, 0.0]), 4).tolist() == [3, 1, 0, 0]
    assert allocate_bits(np.array([1e9, 1.0]), 16).tolist() == [8, 8]
    assert allocate_bits(np.array([1e9, 0.0]), 16).tolist() == [8, 0]
    draw = np.random.default_rng(0)
    for _ in range(20):
        energies = draw.random(12) ** 4
        bits = allocate_bits(energies, 40)
        assert bits.sum() == 40
        left = energies / 4.0**bits
        # No bit would do more elsewhere, unless that dimension is full.
        assert (left[bits < 8].max(initial=0) <= 4 * left[bits > 0].min() * (1 + 1e-9)).all()


def test_cells_lose_no_more_than_equal_counts_do():
    values = np.sort(np.random.default_rng(0).exponential(size=5000))
    bounds = cell_bounds(values, 16)
    assert (np.diff(bounds) > 0).all() and len(bounds) == 15

    def loss(ends):
        codes = np.searchsorted(ends, values, side="right")
        return sum(
            ((values[codes == c] - values[codes == c].mean()) ** 2).sum() for c in set(codes)
        )

    assert loss(bounds) < 0.8 * loss(values[np.arange(1, 16) * 5000 // 16])
    assert len(cell_bounds(values, 1)) == 0
    same = cell_bounds(np.ones(100), 8)
    assert (np.diff(same) >= 0).all()


def test_parts_are_of_about_equal_size_and_near_the_best_assignment():
    rows = clustered(3000)
    labels = balanced_parts(rows, 8, seed=0)
    counts = np.bincount(labels, minlength=8)
    assert counts.sum() == 3000 and counts.max() <= np.ceil(3000 / 8 * 1.1)
    apart = np.random.default_rng(1).random((60, 5)).astype(np.float32) ** 2
    greedy = assign(apart, 12)
    assert np.bincount(greedy).tolist() == [12] * 5
    cost = apart[np.arange(60), greedy].sum()
    _, best = linear_sum_assignment(np.repeat(apart, 12, axis=1))
    assert cost < 1.3 * apart[np.arange(60), best // 12].sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
@pytest.mark.parametrize("segment", [8, 64])
def test_bounds_enclose_every_distance(dtype, segment):
    scale = 20 if dtype == np.uint8 else 1
    vectors = np.clip(clustered(2000) * scale + 100 * (scale > 1), -200, 255).astype(dtype)
    made = OSQIndex(3, 4, segment_bits=segment)
    made.build(vectors)
    for query in clustered(10, seed=1) * scale + 100 * (scale > 1):
        lower, upper = made.bounds(query)
        true = ((vectors.astype(np.float64) - query) ** 2).sum(1)
        assert (lower <= true).all() and (true <= upper).all()
        assert lower.sum() > 0.5 * true.sum()


def test_rotations_preserve_distances(index):
    vectors = clustered(ROWS)
    for part in index.parts:
        rows = vectors[index.arrays.rows[part.begin : part.begin + len(part)]][:100]
        turned = rows @ part.rotation
        for one, other in ((rows, turned),):
            apart = ((one[:, None] - one) ** 2).sum(2)
            after = ((other[:, None] - other) ** 2).sum(2)
            np.testing.assert_allclose(after, apart, rtol=1e-4, atol=1e-4)


# Filters


def expression(draw, depth=0):
    """A random filter, and the same in SQL."""
    what = draw.integers(0, 10 if depth < 3 else 7)
    if what >= 7:
        (one, sql), (two, more) = expression(draw, depth + 1), expression(draw, depth + 1)
        if what == 9:
            return ~one, f"(({sql}) is not true)"
        return (one & two, f"(({sql}) and ({more}))") if what == 7 else (
            one | two, f"(({sql}) or ({more}))"
        )  # fmt: skip
    name = ["price", "year", "huge", "one", "none"][draw.integers(5)]
    value = {
        "price": float(draw.random() * 10),
        "year": int(draw.integers(1989, 2021)),
        "huge": int(draw.integers(-(2**52), 2**52)),
    }.get(name, 7.0)
    column, at = col(name), f"{value!r}::double"
    if what == 0:
        other = value + abs(value) / 2
        return column.between(value, other), f"{name} between {at} and {other!r}::double"
    if what == 1:
        return column == value, f"{name} = {at}"
    if what == 2:
        return column < value, f"{name} < {at}"
    if what == 3:
        return column >= value, f"{name} >= {at}"
    if what == 4:
        some = [str(one) for one in draw.choice(["en", "fr", "", "xx"], 2)]
        return col("lang").isin(some), f"lang in ({', '.join(repr(one) for one in some)})"
    if what == 5:
        return col("new") == bool(value > 5), f"new = {value > 5}"
    return (column > value) | (column <= value / 2), f"({name} > {at} or {name} <= {at} / 2)"


@pytest.mark.parametrize("bits", [2, 8, 12])
def test_rows_that_pass_are_those_of_duckdb(bits):
    draw, table = np.random.default_rng(bits), attributes(ROWS, seed=bits)
    made = OSQIndex(2, 3, attribute_bits=bits)
    made.build(clustered(ROWS, 4), attributes=table)
    rows = table.append_column("row", pa.array(np.arange(ROWS)))  # noqa: F841 - read by DuckDB
    found = 0
    for _ in range(60):
        where, sql = expression(draw)
        wanted = duckdb.sql(f"select row from rows where {sql} order by row").fetchnumpy()["row"]
        passed = np.flatnonzero(made.filter(where))
        np.testing.assert_array_equal(passed, wanted, err_msg=sql)
        found += 0 < len(passed) < ROWS
    assert found > 20


def test_values_at_the_ends_of_cells_and_ranges():
    values = np.repeat(np.arange(1000.0), 3)
    made = OSQIndex(2, 2, attribute_bits=4)
    made.build(clustered(3000, 4), attributes={"v": values})
    for low, high in ((0, 999), (17, 17), (17.5, 18.5), (-5, 0), (998.9, 5000), (40, 30)):
        passed = made.filter(col("v").between(low, high))
        np.testing.assert_array_equal(passed, (values >= low) & (values <= high))
        np.testing.assert_array_equal(made.filter(col("v") > low), values > low)
        np.testing.assert_array_equal(made.filter(col("v") < low), values < low)
        np.testing.assert_array_equal(made.filter(col("v") != low), values != low)
    # What lies in a cell that the range cuts is looked up, and only that.
    hits = made.search(clustered(1, 4)[0], 5, where=col("v") < 500.5, mode="exact")
    assert 0 < hits.stats["verified"][0] < 3000 / 16 * 2
    exact = quantised({"v": np.arange(20)}, 20, 8)[0]
    assert len(exact.cells.low) == 20 and (exact.cells.low == exact.cells.high).all()


def test_expressions_stay_shallow_and_are_plain_values():
    many = col("a") == 0
    for value in range(1, 40):
        many = many & (col("a") != value)
    assert many.depth < 4 and len(many.must) == 40
    either = (col("a") == 1) | (col("b") > 2) | (col("c") <= 3)
    assert len(either.should) == 3 and either.depth == 1
    both = ~((col("a") == 1) & (col("b") == 2))
    assert both.must_not == (PointFilter(must=((col("a") == 1) & (col("b") == 2)).must),)
    assert PointFilter.model_validate(either.model_dump(mode="json")) == either
    assert (PointFilter() | (col("a") == 1)).should[0] == PointFilter()


# Searches


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_exact_search_is_brute_force_with_the_filter(metric):
    vectors, queries, table = clustered(ROWS), clustered(20, seed=1), attributes(ROWS)
    made = OSQIndex(3, 6, metric=metric)
    made.build(vectors, attributes=table)
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    price = table["price"].to_numpy()
    passed = (price < 4) & (table["new"].to_numpy() == 1)
    some = (col("price") < 4) & col("new").isin([True])
    for where, rows in ((None, np.arange(ROWS)), (some, np.flatnonzero(passed))):
        near = exact_neighbours(vectors[rows], queries, 10, metric)
        for threads in (1, 3):
            hits = made.search(queries, 10, where=where, mode="exact", threads=threads)
            np.testing.assert_allclose(hits.distances, near.distances, rtol=1e-3, atol=1e-4)
            assert (hits.ids == rows[near.ids]).mean() > 0.99
        fast = made.search(queries, 10, where=where, beta=1.5, keep=0.3, rerank=5)
        shared = [len(set(a) & set(b)) for a, b in zip(fast.ids, hits.ids, strict=True)]
        assert np.mean(shared) > 9


def test_equally_near_rows_come_in_their_order():
    vectors = np.repeat(clustered(100, 8), 5, axis=0)
    made = OSQIndex(4, 3)
    made.build(vectors)
    hits = made.search(vectors[50], 5, mode="exact")
    assert hits.ids[0].tolist() == [50, 51, 52, 53, 54] and (hits.distances == 0).all()


def test_one_pass_finds_k_rows_wherever_they_are(index):
    queries = clustered(50, seed=2)
    rare = col("huge") < -(2**52) * 0.99
    matches = np.flatnonzero(index.filter(rare))
    assert 10 < len(matches) < 60
    hits = index.search(queries, 10, where=rare)
    assert (hits.ids >= 0).all() and np.isin(hits.ids, matches).all()
    assert hits.stats["parts"].max() > 1


def test_fewer_matches_than_k_are_all_of_them(index):
    few = (col("huge") < -(2**52) * 0.996) & (col("new") == True)  # noqa: E712
    matches = np.flatnonzero(index.filter(few))
    assert 0 < len(matches) < 30
    for mode in ("fast", "exact"):
        hits = index.search(clustered(5, seed=3), 30, where=few, mode=mode)
        for ids, apart in zip(hits.ids, hits.distances, strict=True):
            assert sorted(ids[: len(matches)]) == matches.tolist()
            assert (ids[len(matches) :] == -1).all() and np.isinf(apart[len(matches) :]).all()
    none = index.search(clustered(2, seed=3), 3, where=col("price") > 1e9)
    assert (none.ids == -1).all()


def test_parts_smaller_than_k_and_tiny_indexes():
    for rows, parts in ((1, 10), (5, 10), (30, 10)):
        vectors = clustered(rows)
        made = OSQIndex(4, parts)
        made.build(vectors)
        hits = made.search(vectors[0], 20, mode="exact")
        assert hits.ids[0][0] == 0 and (hits.ids[0] >= 0).sum() == min(rows, 20)
    same = OSQIndex(4, 3)
    same.build(np.ones((100, 5), np.float32))
    assert same.search(np.ones(5), 4, mode="exact").ids[0].tolist() == [0, 1, 2, 3]


def test_stages_look_at_less_and_less(index):
    hits = index.search(clustered(50, seed=4), 10, where=col("year") < 2005)
    stats = {name: values.mean() for name, values in hits.stats.items()}
    assert ROWS / 2 > stats["passed"] > stats["bounded"] > stats["compared"]
    more = index.search(clustered(50, seed=4), 10, where=col("year") < 2005, beta=3.0)
    assert more.stats["parts"].mean() > stats["parts"]


def test_codes_are_as_small_as_the_budget():
    made = OSQIndex(3, 4)
    made.build(clustered(ROWS, 128), attributes={"a": np.random.default_rng(0).random(ROWS)})
    sizes = made.memory()
    assert sizes["codes"] == ROWS * 128 * 3 // 8
    assert sizes["signs"] == ROWS * 16 and sizes["tags"] == ROWS
    assert (sizes["codes"] + sizes["signs"] + sizes["tags"]) * 7 < sizes["vectors"]


def test_vectors_on_disk_are_not_copied(tmp_path):
    np.save(tmp_path / "v.npy", clustered(ROWS).astype(np.float16))
    vectors = np.load(tmp_path / "v.npy", mmap_mode="r")
    made = OSQIndex(4, 5)
    made.build(vectors, threads=2)
    assert made.vectors is vectors
    queries = clustered(10, seed=1)
    near = exact_neighbours(vectors.astype(np.float32), queries, 10, "l2")
    hits = made.search(queries, 10, mode="exact")
    np.testing.assert_allclose(hits.distances, near.distances, rtol=1e-4)


# Files


def test_a_saved_index_answers_as_before(index, tmp_path):
    place = save_index(index, tmp_path / "osq")
    again = load_index(place)
    where, queries = (col("lang") == "en") & (col("price") > 3), clustered(10, seed=1)
    for mode in ("fast", "exact"):
        before = index.search(queries, 10, where=where, mode=mode)
        np.testing.assert_array_equal(
            again.search(queries, 10, where=where, mode=mode).ids, before.ids
        )
    only, size = load_filter(place)
    np.testing.assert_array_equal(
        only.bitmap(only.program(where), 0, ROWS), index.bitmap(index.program(where), 0, ROWS)
    )
    part, more = load_part(place, 2)
    assert len(part) == len(index.parts[2]) and more > 0 and size < 60 * ROWS
    with pytest.raises(VectorIndexError, match="exists already"):
        save_index(index, place)
    with pytest.raises(VectorIndexError, match="nothing is indexed"):
        save_index(OSQIndex(), tmp_path / "none")


def test_damaged_files_are_refused(index, tmp_path):
    from safetensors.numpy import load_file, save_file

    place = save_index(index, tmp_path / "osq")

    def refused():
        with pytest.raises(VectorIndexError, match="not an index of osq"):
            load_index(place)

    for name in ("index.json", "common.safetensors", "part-00001.safetensors", "vectors.npy"):
        path = place / name
        whole = path.read_bytes()
        for text in (whole[: len(whole) // 2], b"", b"[]"):
            path.write_bytes(text)
            refused()
        path.write_bytes(whole)
    path = place / "part-00001.safetensors"
    arrays = load_file(path)
    for name, value in (
        ("bits", arrays["bits"] + np.uint8(9)), ("rows", arrays["rows"] + np.int32(ROWS)),
        ("rows", arrays["rows"][:-1]), ("records", arrays["records"][:-1].copy()),
        ("low", arrays["low"][:-1]), ("records", arrays["records"].astype(np.int64)),
    ):  # fmt: skip
        save_file({**arrays, name: value}, path)
        refused()
    save_file(arrays, path)
    load_index(place)
    path = place / "common.safetensors"
    arrays = load_file(path)
    for name, value in (
        ("begins", arrays["begins"] * 2), ("tags", arrays["tags"][:, :-1].copy()),
        ("low.0", np.append(arrays["low.0"], np.zeros(300))), ("radii", arrays["radii"][:-1]),
    ):  # fmt: skip
        save_file({**arrays, name: value}, path)
        refused()


# Bad input


def test_bad_options_and_vectors(index):
    for options in (
        {"bits_per_dim": 8.5}, {"bits_per_dim": 0}, {"parts": 0}, {"segment_bits": 12},
        {"attribute_bits": 0}, {"beta": 0.5}, {"keep": 0}, {"rerank": float("nan")},
        {"metric": "l1"},
    ):  # fmt: skip
        with pytest.raises(VectorIndexError, match="expected"):
            OSQIndex(**options)
    fresh, vectors = OSQIndex(), clustered(50)
    with pytest.raises(VectorIndexError, match="nothing is indexed"):
        fresh.search(vectors[0], 3)
    vectors[7, 3] = np.nan
    with pytest.raises(VectorIndexError, match="row 7"):
        fresh.build(vectors)
    with pytest.raises(VectorIndexError, match=r"\[0, 20\]"):
        fresh.build(vectors[:0])
    with pytest.raises(VectorIndexError, match=r"expected \[N, 20\]"):
        index.search(np.zeros(5), 3)
    with pytest.raises(VectorIndexError, match="not finite"):
        index.search(np.full(DIM, np.inf), 3)
    for options in (
        {"k": 0}, {"k": 10**6}, {"mode": "slow"}, {"threads": 0}, {"keep": 2}, {"beta": 0.1},
    ):  # fmt: skip
        with pytest.raises(VectorIndexError, match="expected k from 1"):
            index.search(vectors[0], **{"k": 3, **options})


def test_bad_attributes():
    made, vectors = OSQIndex(), clustered(50)
    for given, text in (
        ({"a": np.zeros(49)}, "'a' has 49 values for 50 rows"),
        ({"a": np.full(50, np.nan)}, "'a': expected finite numbers"),
        ({"a": np.full(50, 2**60)}, "'a': expected whole numbers"),
        ({"a": [[1]] * 50}, "'a' holds list"),
        ({"a": [1, "x"] * 25}, "expected a table"),
        ([1, 2], "expected a table"),
    ):
        with pytest.raises(VectorIndexError, match=text):
            made.build(vectors, attributes=given)


def test_bad_filters(index):
    query = clustered(1)[0]
    for where, text in (
        (col("prize") > 3, "no attribute 'prize'.*price"),
        (col("lang") > 3, "'lang' holds text; expected = or in"),
        (col("lang") == 3, "'lang' holds text; 3 is none"),
        (col("price") == "cheap", "'price' holds numbers; 'cheap' is none"),
        (col("price") == True, "'price' holds numbers; True is none"),  # noqa: E712
        (col("new") == 1, "'new' holds true or false; 1 is none"),
        ("price > 3", "expected an expression"),
    ):
        with pytest.raises(VectorIndexError, match=text):
            index.search(query, 3, where=where)
    bare = OSQIndex()
    bare.build(clustered(20))
    with pytest.raises(VectorIndexError, match="there are none"):
        bare.search(query, 3, where=col("price") > 3)
    for wrong in (
        lambda: col("a") < "3", lambda: col("a") < True, lambda: col("a") > float("nan"),
        lambda: col("a") == None, lambda: col("a") == float("nan"), lambda: col("a").isin("xyz"),  # noqa: E711
        lambda: col("a").isin([[1]]),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="a"):
            wrong()
