"""algorithms: reductions, scans and orders under the policies of :mod:`shoal.kernel.algorithms`."""

from shoal.claims.lab.algorithms.order import histogram, partition, sort, unique
from shoal.claims.lab.algorithms.reduce import reduce, transform_reduce
from shoal.claims.lab.algorithms.scan import exclusive_scan, inclusive_scan

__all__ = [
    "exclusive_scan",
    "histogram",
    "inclusive_scan",
    "partition",
    "reduce",
    "sort",
    "transform_reduce",
    "unique",
]
