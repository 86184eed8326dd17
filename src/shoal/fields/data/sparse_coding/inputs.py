"""Reading what is explained: vectors of a file, patches of photographs, or bars.

Source of the bars test: Foeldiak, Forming Sparse Representations by Local Anti-Hebbian Learning,
1990.
"""

from __future__ import annotations

import numpy as np

from shoal.core.counts import count
from shoal.core.errors import DataError
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.corpora.photos import photo_patches
from shoal.fields.data.sparse_coding.job import SparseCodeJob
from shoal.fields.data.sparse_coding.protocols import Floats, SparseCodeError, Superposition
from shoal.fields.data.vectors import check_finite, read_vectors

_EDGE = 8
_HEIGHT, _NOISE, _ACTIVE = 10.0, 0.1, 2
_SHOWN = 5


def bars(edge: int = _EDGE, *, signed: bool = False) -> Floats:
    """Float64 [2 edge, edge * edge]: pictures of one row or one column of height 10 each.

    Args:
        edge: pixels of a side.
        signed: every other one is negative.
    """
    pictures = np.zeros((2 * edge, edge, edge))
    for at in range(edge):
        pictures[at, at, :] = pictures[edge + at, :, at] = _HEIGHT
    if signed:
        pictures[::2] *= -1
    return pictures.reshape(2 * edge, -1)


def bars_of(model: Superposition, num: int, *, edge: int = _EDGE, seed: int = 0) -> Floats:
    """Float64 [num, edge * edge]: bars put together by a model; two are there in the mean.

    Args:
        model: says how bars are combined; the noise is a tenth of a bar.
        num: how many pictures.
        edge: pixels of a side.
        seed: of the draw.
    """
    pictures = bars(edge, signed=model.signed)
    params = model.truth(pictures, _ACTIVE / len(pictures), _NOISE * _HEIGHT)
    data, _ = model.sample(params, num, generator(seed, purpose="bars"))
    return data


def points_of(job: SparseCodeJob) -> tuple[Floats, str]:
    """The vectors of a job, float64 [N, D], and which columns were taken.

    Raises:
        DataError: the file cannot be read, or holds no numbers; names the place.
        SparseCodeError: there are too few, or a column is constant.
    """
    source, _, rest = job.data.partition(":")
    note = ""
    if source == "patches":
        data = photo_patches(count(rest, "data = patches:N"), seed=job.seed)
    elif source == "bars":
        number, _, name = rest.partition(":")
        model = table("superposition").build(name or "mca", where="data = bars:N:MODEL")
        data = bars_of(model, count(number, "data = bars:N"), seed=job.seed)
    else:
        matrix, note = read_vectors(job.data, job.columns)
        check_finite(matrix, job.data)
        data = np.asarray(matrix, np.float64)
    check_points(data, job.data)
    return data, note


def check_points(data: Floats, where: str) -> None:
    """Refuse what no model can be estimated from.

    Args:
        data: [N, D], finite.
        where: names them in a message.

    Raises:
        SparseCodeError: fewer than two vectors, or a column that is constant.
        DataError: there are no numbers.
    """
    if data.ndim != 2 or not data.size:
        raise DataError(f"{where}: no numbers; give vectors, a row for each")
    if len(data) < 2:
        raise SparseCodeError(f"{where}: n_samples = 1: expected at least two vectors")
    constant = np.flatnonzero((data == data[0]).all(axis=0))
    if len(constant):
        more = ", ..." if len(constant) > _SHOWN else ""
        raise SparseCodeError(
            f"{where}: constant columns: {', '.join(map(str, constant[:_SHOWN]))}{more}: the noise "
            "around them has no variance; leave them out"
        )
