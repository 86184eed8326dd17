"""What k-medoids costs: the rates of a machine, and the estimates that the methods share.

A search is rows: computed or read from memory, held against what is cached of the medoids. How
long one number of a row takes is timed here in under a second, and kept in ``clustering.json`` of
Shoal's home for this processor; for a machine that is only described it follows from its memory
bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.core.native import cpu_model
from shoal.core.random import generator
from shoal.fields.data.cluster.protocols import ClusterRates, ClusterWork
from shoal.fields.data.cluster.search import MedoidSearch, best_swap, eager, expand, native
from shoal.fields.data.cluster.storage import STORAGES, Matrix, Storage, Vectors, storage_bytes
from shoal.fields.rates import kept_rates, least_seconds
from shoal.ir import Estimate, Interval, Machine

# Shares of what a described CPU could do at best that the kernels reach.
_OF_BANDWIDTH, _OF_FLOPS = 0.4, 0.5
_EXPAND, _TEXTBOOK_CYCLES, _REPAIR_S = 1.5, 1.5, 3e-9
# Half-widths: of a sum of timed rates on a shared machine, and of derived ones.
_SPREAD_TIMED, _SPREAD_DERIVED = 0.5, 3.0
# Share of the memory that a plan may fill.
_USABLE = 0.8
_EDGE = 3000


def state_bytes(n: int, k: int) -> float:
    """Bytes of what is cached of the medoids: a number for each pair, and six for each object."""
    return 4.0 * n * k + 24.0 * n


def estimate_of(
    work: ClusterWork,
    storage: Storage,
    *,
    passes: Interval,
    pass_s: float,
    once_s: float = 0.0,
    start: bool = True,
) -> Estimate:
    """Seconds and bytes of a search that reads all rows in each of its passes.

    Args:
        work: what is clustered.
        storage: how dissimilarities are kept.
        passes: over all candidates.
        pass_s: seconds of a pass beside getting at the rows.
        once_s: seconds of what does not depend on the passes.
        start: add the start's own passes.
    """
    rates, cells = work.rates, float(work.n) ** 2
    compute = rates.distance_s * cells if work.dim else 0.0
    fetch = {"full32": 0.0, "condensed": rates.expand_s * cells, "on_demand": compute}[storage]
    if storage == "full32":
        compute /= 2  # the other half is copied
    begin = work.k * (fetch + cells * rates.scan_s) if start and work.init == "build" else 0.0
    before = (0.0 if storage == "on_demand" else compute) + begin + once_s
    capped = [min(count, float(work.max_iter)) for count in (passes.low, passes.value, passes.high)]
    low, value, high = (before + count * (pass_s + fetch) for count in capped)
    spread = 1 + rates.spread
    return Estimate(
        step_s=Interval(value=value, low=low / spread, high=high * spread),
        total_s=Interval(value=value, low=low / spread, high=high * spread),
        terms_s={"data": before, "memory": value - before},
        memory_bytes={
            "dissimilarities": storage_bytes(storage, work.n),
            "medoids": state_bytes(work.n, work.k),
            "objects": 16.0 * work.n * work.dim,
        },
        bound="memory" if storage == "full32" else "compute",
    )


def fitting(work: ClusterWork, machine: Machine) -> Iterator[Storage]:
    """The ways to keep dissimilarities that the memory has room for."""
    capacity = machine.device.main_memory.capacity_bytes
    for storage in STORAGES:
        if storage == "on_demand" and not work.dim:
            continue  # they are given: nothing is computed
        needed = storage_bytes(storage, work.n) + state_bytes(work.n, work.k)
        if not capacity or needed <= _USABLE * capacity:
            yield storage


def rates_of(machine: Machine, *, dim: int, metric: str) -> ClusterRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        key = f"{cpu_model()}|{metric}|{dim}"
        return kept_rates("clustering.json", key, ClusterRates, lambda: timed(dim, metric))
    memory = machine.device.main_memory.read_bandwidth or 1e10
    cores = max(machine.device.num_cores or 1, 1)
    flops = machine.device.peak_flops.get("fp32", 1e11) / cores
    if machine.device.kind == "gpu":  # its host is not described; a core of a server
        memory, flops = 2.5e10, 5e10
    scan = 4.0 / (_OF_BANDWIDTH * memory)
    return ClusterRates(
        scan_s=scan,
        expand_s=_EXPAND * scan,
        textbook_s=_TEXTBOOK_CYCLES * 8 / flops,
        repair_s=_REPAIR_S,
        # fp64, and what is not multiplications.
        distance_s=2.0 * (2.0 * dim + 8.0) / (_OF_FLOPS * flops) if dim else 0.0,
        spread=_SPREAD_DERIVED,
        measured=False,
    )


def timed(dim: int, metric: str = "euclidean", edge: int = _EDGE) -> ClusterRates:
    """Time the kernels on this machine, for most of a second.

    Args:
        dim: numbers of a vector; 0 for none.
        metric: of the vectors.
        edge: objects that are clustered for it.
    """
    k = max(2, min(50, edge // 10))
    draw = generator(0, purpose="clustering rates")
    vectors = draw.standard_normal((edge, dim or 8))
    objects = Vectors(vectors, metric if dim else "euclidean")
    begin, piece = least_seconds(lambda: objects.between(slice(0, edge // 4), slice(None)))
    distance = begin / piece.size
    ids, whole = np.arange(edge), Matrix(objects).rows(0, edge)
    search = MedoidSearch(ids[:k], np.ascontiguousarray(whole[:, :k]), native())

    def scan() -> None:
        search.since = 0
        eager(search, whole, ids, ids, limit=edge)

    while search.since < edge:  # what is timed is a pass that brings nothing
        scan()

    scan_s, _ = least_seconds(scan)
    few = ids[: max(1, edge // 100)]
    textbook, _ = least_seconds(lambda: best_swap(search, whole, few, textbook=True))
    again = int(search.medoids[0])
    repair, _ = least_seconds(lambda: search.swap(0, again, whole[again]))
    lower, unfolded = whole[np.tril_indices(edge, -1)], np.empty((edge // 10, edge), np.float32)
    unfold, _ = least_seconds(lambda: expand(lower, edge, edge // 2, unfolded))
    return ClusterRates(
        scan_s=scan_s / edge**2,
        expand_s=unfold / unfolded.size,
        textbook_s=textbook / (len(few) * k * edge),
        repair_s=repair / edge,
        distance_s=distance if dim else 0.0,
        spread=_SPREAD_TIMED,
        measured=True,
    )
