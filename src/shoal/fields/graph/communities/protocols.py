"""What expanders of communities promise, and what they see of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.ir import Estimate, Machine


class CommunityError(ConfigError, ValueError):
    """A community that cannot be asked for, such as one of a vertex that is not there."""


class GrowingUnion(Protocol):
    """The union of a community's sets, beside candidates."""

    def scores(self) -> np.ndarray:
        """Jaccard similarity of the union with each candidate, float64 [n]."""

    def add(self, at: int) -> None:
        """Put the set of the candidate at this place into the union."""


class Similarities(Protocol):
    """Jaccard similarities of vertices' sets of neighbours, estimated or exact.

    Vertices are rows, int64.
    """

    def candidates(self, seeds: np.ndarray) -> np.ndarray:
        """Rows that may be similar to a seed, ascending, without the seeds."""

    def similarity(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Jaccard similarity of rows [n] with others [m], float64 [n, m]."""

    def union(self, rows: np.ndarray, candidates: np.ndarray) -> GrowingUnion:
        """The union of the sets of some rows."""


@dataclass(frozen=True)
class Expansion:
    """Which rows belong to some seeds.

    Args:
        rows: int64 [n], the most similar first.
        scores: float64 [n], by which they were chosen.
        candidates: rows that were looked at.
    """

    rows: np.ndarray
    scores: np.ndarray
    candidates: int


class CommunityRates(Value):
    """What steps take on one core.

    Args:
        hash_s: seconds for a hash of a member of a set.
        byte_s: for a byte of a signature that is made and moved.
        sort_s: for a vertex in a band that is sorted.
        slot_s: for a slot of two signatures that is compared.
        mate_s: for a band of a seed that is looked up.
        step_s: for a step of an expansion, whatever its size.
        solve_s: for a multiplication of a system of equations that is solved.
        spread: of what follows from them.
    """

    hash_s: float
    byte_s: float
    sort_s: float
    slot_s: float
    mate_s: float
    step_s: float
    solve_s: float
    spread: float


class CommunityWork(Value):
    """A query.

    Args:
        num_vertices: with a signature.
        hashes: slots of a signature.
        bands: in which mates are looked up.
        seeds: of the query.
        size: of the community, seeds included.
        candidates: that are compared with the seeds.
        rates: of a core.
    """

    num_vertices: int
    hashes: int
    bands: int
    seeds: int
    size: int
    candidates: int
    rates: CommunityRates

    @property
    def lookup_s(self) -> float:
        """Seconds to find candidates: look up the seeds in bands, and count shared ones."""
        return self.rates.mate_s * self.bands * self.seeds + 1e-9 * self.num_vertices

    @property
    def compare_s(self) -> float:
        """Seconds to compare all candidates with all seeds."""
        return self.rates.slot_s * self.hashes * self.candidates * self.seeds


@runtime_checkable
class CommunityExpander(Protocol):
    """A way to choose who belongs to some seeds: a part of kind ``community_expander``."""

    def estimate(self, work: CommunityWork, machine: Machine) -> Estimate:
        """Seconds (``step_s``) and bytes of a query; allocates nothing."""

    def expand(self, graph: Similarities, seeds: np.ndarray, count: int) -> Expansion:
        """Choose rows.

        Args:
            graph: similarities of rows.
            seeds: int64 [s], different.
            count: how many rows are wanted beside the seeds; there are fewer where there are not
                so many candidates.
        """
