"""What a method that clusters is, what it is given, and what it returns.

A method of k-medoids reads rows of dissimilarities and moves medoids until no move that it knows
improves the loss, the sum over all objects of the dissimilarity to their nearest medoid. It keeps
no state: what it has reached so far is handed to ``ClusteringProblem.tick`` several times a second,
as plain JSON, and a search that is given such a state goes on from there to the medoids that it
would have ended with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    runtime_checkable,
)

from shoal.core.config import Value
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.fields.data.cluster.storage import DissimilarityRows, Objects, Storage
    from shoal.ir import Estimate, Interval, Machine

State: TypeAlias = dict[str, Any]
"""Where a search stands, as JSON: always ``medoids`` and ``swaps``."""

Tick: TypeAlias = "Callable[[float, float, State], None]"
"""Called with (share that is surely done, loss so far, state to go on from)."""


class ClusterError(ConfigError, ValueError):
    """Objects, or a number of clusters, that cannot be used."""


class ClusterRates(Value):
    """How fast a machine does what the methods do, each with one thread.

    Args:
        scan_s: seconds to read one dissimilarity of a row and hold it against its object's second.
        expand_s: seconds to unfold one dissimilarity of a condensed matrix.
        textbook_s: seconds of one object in the textbook's change of one pair.
        repair_s: seconds of one object when a swap is made.
        distance_s: seconds to compute one dissimilarity.
        spread: half-width of the 90 % interval of a sum of them, as a share.
        measured: on this machine, or derived from its description.
    """

    scan_s: float
    expand_s: float
    textbook_s: float
    repair_s: float
    distance_s: float
    spread: float
    measured: bool


class ClusterWork(Value):
    """What is clustered, as the methods' estimates see it.

    Args:
        k: clusters; 0 where the method finds how many.
        dim: numbers of one vector; 0 where the dissimilarities are given.
        metric: of the vectors.
    """

    n: int
    k: int
    dim: int = 0
    metric: str = "euclidean"
    threads: int = 1
    init: Literal["random", "build", "lab"] = "random"
    max_iter: int = 100
    rates: ClusterRates


@dataclass
class ClusteringProblem:
    """One clustering.

    Args:
        objects: what is clustered.
        k: clusters; a search for medoids is given 2 to n - 1, fewer and more need none. 0 where the
            method finds how many.
        start: int64 [k] initial medoids, or None for ``init``.
        init: ``random``, ``build`` or ``lab``.
        max_iter: most passes over the candidates.
        seed: of everything random.
        state: where a search that was stopped stood.
        tick: receives the progress.
        say: receives a share that is done, and what is being done.
    """

    objects: Objects
    k: int
    start: Any = None
    init: Literal["random", "build", "lab"] = "random"
    max_iter: int = 100
    seed: int = 0
    threads: int = 1
    state: State | None = None
    tick: Tick = lambda done, loss, state: None
    say: Callable[[float, str], None] = lambda done, text: None
    rows: DissimilarityRows | None = None

    def kept(self, storage: Storage) -> DissimilarityRows:
        """The dissimilarities, kept as a method wants them."""
        from shoal.fields.data.cluster.storage import kept

        if self.rows is not None:
            return self.rows
        return kept(self.objects, storage, lambda done: self.say(done, "dissimilarities"))


@dataclass(frozen=True)
class ClusteringResult:
    """Where a search ended.

    Args:
        medoids: int64 [k], objects.
        loss: sum of the dissimilarities to the nearest medoid, as the swaps kept it up.
        passes: passes over the candidates, or rounds.
        converged: no swap that the method knows improves the loss.
        details: anything else.
    """

    medoids: Any
    loss: float
    swaps: int
    passes: int
    converged: bool = True
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Clusters of objects, as a run keeps and shows them.

    Args:
        labels: int64 [n], from 0 on.
        measured: quantity of the kind -> value.
        what: what a cluster is named after, such as ``medoid``.
        names: of each cluster, which that is.
        columns: name -> [n], of ``labels.parquet`` besides object and label.
        files: name -> JSON.
        pictures: name -> SVG.
        converged: more steps would change nothing.
        details: of the report, as JSON.
    """

    labels: Any
    measured: Mapping[str, float]
    what: str
    names: Sequence[str]
    columns: Mapping[str, Any]
    files: Mapping[str, Any]
    pictures: Mapping[str, str] = field(default_factory=dict)
    converged: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Clusterer(Protocol):
    """A part of kind ``clusterer``: one way to cluster.

    Attributes:
        finds_k: it finds the number of clusters, and takes the job's ``k`` for the most.
        assumes: what its estimates assume of the data, as part of a sentence.
    """

    finds_k: ClassVar[bool]
    assumes: ClassVar[str]

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """Seconds of the whole search, dissimilarities included, and bytes by cause."""

    def excess(self, work: ClusterWork) -> Interval | None:
        """Loss over that of FasterPAM, minus one: an assumption from the runs in ``docs``.

        None for a method that minimizes something else.
        """

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def cluster(self, problem: ClusteringProblem) -> Clustering:
        """Cluster the objects.

        Raises:
            ClusterError: there cannot be so many clusters; objects of a kind that it does not take;
                there is not enough memory for what it keeps.
        """


@runtime_checkable
class MedoidSearcher(Protocol):
    """A method that finds medoids."""

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Find medoids.

        Raises:
            ClusterError: there is not enough memory for what it keeps.
        """
