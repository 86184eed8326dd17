"""Texts of packages, and tables of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from shoal.core.errors import DataError, ShoalError
from shoal.core.parts import table
from shoal.fields.federate.learn.partitions import Dirichlet, DualDirichlet, Natural
from shoal.fields.federate.learn.texts import _descriptions
from shoal.fields.federate.protocols import FederationError


def source(name: str, **options: object):
    return table("example_source").build({"name": name, **options})


def test_texts_are_those_of_the_packages_and_each_follows_the_last() -> None:
    train, test = source("text", packages=3, seq_len=32, most=4000).load(0)
    assert train.classes == 256
    assert set(train.owner) == set(test.owner) == {0, 1, 2}
    assert len(train) + len(test) == sum(
        (min(len(text.encode()), 4000) - 1) // 32 for _, text in _descriptions()[:3]
    )
    whole = _descriptions()[1][1].encode()
    for row in np.flatnonzero(train.owner == 1)[:3]:
        assert bytes(train.x[row].astype(np.uint8)) in whole
        np.testing.assert_array_equal(train.x[row][1:], train.y[row][:-1])
    # Nobody tests on what is learned.
    seen = {one.tobytes() for one in train.x}
    assert sum(one.tobytes() in seen for one in test.x) < len(test) / 20


def test_owners_are_clients_and_classes_are_none() -> None:
    train, _ = source("text", packages=4, most=3000).load(0)
    rows = Natural().split(train, 4, 0)
    assert {tuple(set(train.owner[some])) for some in rows} == {(0,), (1,), (2,), (3,)}
    assert len(Natural().split(train, 2, 0)) == 2
    for part in (Dirichlet(), DualDirichlet()):
        with pytest.raises(FederationError, match="no classes; take natural or iid"):
            part.split(train, 4, 0)
    with pytest.raises(FederationError, match="client"):
        Natural().split(train, 5, 0)


def test_more_packages_than_there_are_are_refused() -> None:
    with pytest.raises(DataError, match="installed packages have a description"):
        source("text", packages=100_000).load(0)
    with pytest.raises(DataError, match="fewer than seq_len"):
        source("text", packages=2, seq_len=3000, most=2000).load(0)


ROWS = [
    {"age": at, "weight": 2.5 * (at % 7), "kind": "cat" if at % 3 else "dog", "shop": f"s{at % 4}"}
    for at in range(40)
]


def written(place: Path, form: str, rows: list[dict] = ROWS) -> Path:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    path = place / f"pets.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "csv":
        pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), path)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_table_in_every_format(tmp_path: Path, form: str) -> None:
    path = str(written(tmp_path, form))
    train, test = source("file", path=path, label="kind", owner="shop").load(0)
    assert (len(train), len(test), train.classes) == (32, 8, 2)
    x = np.concatenate([train.x, test.x])
    assert x.shape == (40, 2)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-5)
    y, owner = np.concatenate([train.y, test.y]), np.concatenate([train.owner, test.owner])
    assert np.bincount(y).tolist() == [26, 14]  # cat before dog
    assert np.bincount(owner).tolist() == [10] * 4
    one, _ = source("file", path=path, label="kind", features=["age"]).load(0)
    assert one.x.shape[1] == 1
    assert not len(one.owner)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "breed"}, "no column 'breed'; it has age, weight, kind, shop"),
        ({"label": "kind", "features": ["shop"]}, "features are numbers"),
        ({"label": "kind", "owner": "kind"}, "names? a column twice"),
        ({"label": "kind", "features": ["age", "age"]}, "names? a column twice"),
    ],
)
def test_a_table_that_does_not_fit(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        source("file", path=str(written(tmp_path, "parquet")), **options).load(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age": None}, "column 'age' has 1 values that are missing or not finite, the first in"),
        ({"weight": float("nan")}, "row 4"),
        ({"kind": None}, "rows without a value"),
    ],
)
def test_gaps_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    rows = [dict(row) for row in ROWS]
    rows[3] |= change
    with pytest.raises(DataError, match=words):
        source("file", path=str(written(tmp_path, "parquet", rows)), label="kind").load(0)


def test_nothing_to_learn_and_nothing_there(tmp_path: Path) -> None:
    same = [row | {"kind": "cat"} for row in ROWS]
    with pytest.raises(DataError, match="one value"):
        source("file", path=str(written(tmp_path, "parquet", same)), label="kind").load(0)
    with pytest.raises(ShoalError, match="absent"):
        source("file", path=str(tmp_path / "absent.csv"), label="kind").load(0)
    (tmp_path / "words.csv").write_text("kind,shop\ncat,a\ndog,b\n")
    with pytest.raises(DataError, match="no column of numbers"):
        source("file", path=str(tmp_path / "words.csv"), label="kind").load(0)
