"""Files of vectors and dissimilarities: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.core.errors import DataError, ShoalError
from shoal.fields.data.cluster.inputs import objects_of, shape_of
from shoal.fields.data.cluster.job import ClusterJob

X = np.random.default_rng(0).normal(size=(12, 3)).round(3)
NAMES = ("a", "b", "c")


def written(folder: Path, ending: str) -> Path:
    path = folder / f"vectors{ending}"
    rows = [dict(zip(NAMES, row, strict=True)) for row in X.tolist()]
    if ending == ".npy":
        np.save(path, X)
    elif ending == ".csv":
        lines = [",".join(("id", *NAMES))]
        lines += [",".join(map(str, (f"row {i}", *row))) for i, row in enumerate(X.tolist())]
        path.write_text("\n".join(lines))
    elif ending == ".jsonl":
        path.write_text("\n".join(json.dumps({"id": "x", **row}) for row in rows))
    elif ending == ".lists.jsonl":
        path.write_text("\n".join(json.dumps({"n": 1, "vector": row}) for row in X.tolist()))
    elif ending == ".parquet":
        columns = {name: X[:, at] for at, name in enumerate(NAMES)}
        pq.write_table(pa.table({"id": ["x"] * 12, **columns}), path)
    else:
        pq.write_table(pa.table({"id": ["x"] * 12, "vector": X.tolist()}), path)
    return path


@pytest.mark.parametrize(
    "ending", [".npy", ".csv", ".jsonl", ".lists.jsonl", ".parquet", ".lists.parquet"]
)
def test_vectors(ending: str, tmp_path: Path) -> None:
    job = ClusterJob(data=str(written(tmp_path, ending)), k=2)
    assert shape_of(job)[:2] == (12, 3)
    objects = objects_of(job)
    wanted = np.linalg.norm(X[:, None] - X[None], axis=2)
    assert objects.between(slice(None), slice(None)) == pytest.approx(wanted, abs=1e-6)
    if "lists" not in ending and ending != ".npy":
        assert "a, b, c" in shape_of(job).note
        some = job.model_copy(update={"columns": ("c", "a")})
        assert shape_of(some)[:] == (12, 2, "")
        wanted = np.linalg.norm((X[:, None] - X[None])[:, :, [2, 0]], axis=2)
        assert objects_of(some).between(slice(None), slice(None)) == pytest.approx(wanted, abs=1e-6)


def test_dissimilarities(tmp_path: Path) -> None:
    D = np.linalg.norm(X[:, None] - X[None], axis=2)
    np.save(tmp_path / "d.npy", D)
    job = ClusterJob(data=str(tmp_path / "d.npy"), metric="precomputed", k=2)
    assert shape_of(job)[:2] == (12, 0)
    assert objects_of(job).between(slice(None), slice(None)) == pytest.approx(D, abs=1e-6)
    D[0, 1] += 1
    np.save(tmp_path / "d.npy", D)
    with pytest.raises(ShoalError, match="not symmetric"):
        objects_of(job)
    objects_of(job.model_copy(update={"symmetric": False}))


def test_photos() -> None:
    pytest.importorskip("sklearn")
    job = ClusterJob(data="photos:20", k=2)
    assert shape_of(job)[:2] == (20, 128)
    assert objects_of(job).n == 20
    with pytest.raises(ShoalError, match="photos are vectors"):
        shape_of(job.model_copy(update={"metric": "precomputed"}))
    with pytest.raises(ShoalError, match="photos"):
        shape_of(ClusterJob(data="photos:many"))


def refused(path: Path, said: str, **values: object) -> None:
    with pytest.raises(DataError, match=said):
        objects_of(ClusterJob.model_validate({"data": str(path), "k": 2, **values}))


def test_what_is_no_file_of_numbers(tmp_path: Path) -> None:
    refused(tmp_path / "no.npy", "no such file")
    for name, text, said in (
        ("x.txt", "1 2", "expected a file that ends with"),
        ("x.npy", "no", "not an array"),
        ("x.parquet", "no", "cannot be read"),
        ("x.jsonl", "{", "cannot be read"),
        ("words.csv", "a,b\nx,y\n", "no column of numbers among a, b"),
        ("gap.csv", "a,b\n1,2\n,3\n", "row 1 of 2 has NaN, infinity or nothing"),
    ):
        (tmp_path / name).write_text(text)
        refused(tmp_path / name, said)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.csv").write_text("a\n1\n")
    refused(tmp_path / "folder", "a directory; give one file")
    np.save(tmp_path / "flat.npy", np.zeros(5))
    refused(tmp_path / "flat.npy", r"shape \(5,\)")
    np.save(tmp_path / "words.npy", np.array([["a"]]))
    refused(tmp_path / "words.npy", "expected numbers")
    path = tmp_path / "ragged.jsonl"
    path.write_text('{"v": [1, 2]}\n{"v": [1]}\n')
    refused(path, "lists of different lengths")
    refused(path, "there is no 'w'; it has v", columns=["w"])
    path.write_text('{"v": [1, 2], "w": [1], "s": "x"}\n')
    refused(path, "several columns with lists: v, w")
    refused(path, "'s' holds string, not numbers", columns=["s"])
