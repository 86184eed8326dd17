"""Reading what is clustered: vectors or dissimilarities from a file, or from the photographs."""

from __future__ import annotations

from shoal.corpora.photos import DIM, photo_descriptors
from shoal.fields.data.cluster.job import ClusterJob
from shoal.fields.data.cluster.protocols import ClusterError
from shoal.fields.data.cluster.storage import Objects, Precomputed, Vectors
from shoal.fields.data.readers import num_photos
from shoal.fields.data.vectors import VectorShape, check_finite, read_vectors, vector_shape

_PHOTOS = "photos"


def shape_of(job: ClusterJob) -> VectorShape:
    """Rows and columns of a job's data; no columns where dissimilarities are given.

    Raises:
        DataError: the file cannot be read, or holds no numbers.
    """
    if job.data.partition(":")[0] == _PHOTOS:
        _not_precomputed(job)
        return VectorShape(num_photos(job.data), DIM, "")
    shape = vector_shape(job.data, job.columns)
    return shape._replace(dim=0) if job.metric == "precomputed" else shape


def objects_of(job: ClusterJob) -> Objects:
    """The objects of a job.

    Raises:
        DataError: the file cannot be read, or holds no numbers; names the place.
        ClusterError: dissimilarities that cannot be used, or a metric that there is not.
    """
    if job.data.partition(":")[0] == _PHOTOS:
        _not_precomputed(job)
        return Vectors(photo_descriptors(num_photos(job.data)).vectors, job.metric)
    matrix, _ = read_vectors(job.data, job.columns)
    if job.metric == "precomputed":
        return Precomputed(matrix, symmetric=job.symmetric)
    check_finite(matrix, job.data)
    return Vectors(matrix, job.metric)


def _not_precomputed(job: ClusterJob) -> None:
    if job.metric == "precomputed":
        raise ClusterError("metric = precomputed: photos are vectors; choose cosine or euclidean")
