"""[124] SMASH: does hashing in a cache beat inner and outer products, SciPy and GraphBLAS?

Source: Kheradmand et al., SMASH: Sparse Matrix Atomic Scratchpad Hashing, 2021.

Skewed R-MAT graphs, the 5-point operator of a grid and a graph of nearest neighbours, each times
itself. Inner and outer products are our own, by the same compiler and threads. The A/A run puts
the outer product in the place of the hash. The quick run counts: wrong entries, memory beyond the
matrices, and slots that are looked at for a product.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from scipy.sparse import csr_array

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.rmat import grid, rmat
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import install
from shoal.core.parts import part
from shoal.core.random import generator

_NEIGHBOURS = 16


@part
class Smash(BaseClaim, row=124, needs=("c++", "torch")):
    """Products of sparse matrices with themselves.

    Args:
        inner_scale: R-MAT scale where inner products are tried too; they look at every pair.
        scale: R-MAT scale of the others.
        edge_factor: edges drawn per node.
        points: points of the graph of nearest neighbours.
        grid_edge: edge of the grid.
        pairs: rounds.
    """

    inner_scale: Annotated[int, Ge(4), Le(18)] = 13
    scale: Annotated[int, Ge(4), Le(18)] = 14
    edge_factor: Annotated[int, Ge(1)] = 16
    points: Annotated[int, Ge(1)] = 20_000
    grid_edge: Annotated[int, Ge(1)] = 512
    pairs: Annotated[int, Ge(1)] = 31

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        method = run.pick("hash", "outer")
        run.progress("counting", 0.02)
        run.put("wrong_products", _wrong(run.seed, method))
        small = self._graph(run, self.inner_scale)
        counters = _counters(small, method)
        # Bytes beyond the matrices, beside those of all products.
        run.put("memory_share", counters["table_bytes"], 12.0 * counters["multiplies"])
        run.put("probes", _probes(method))
        if not run.quick:
            self._time(run, small, method)

    def _graph(self, run: ClaimRun, scale: int) -> csr_array:
        made = functools.partial(rmat, scale, self.edge_factor, seed=run.seed)
        return run.remember(f"rmat {scale}", made)

    def _time(self, run: ClaimRun, small: csr_array, method: str) -> None:
        from shoal.kernel.spgemm.hash import Hash

        times: dict[str, Mapping[str, tuple[float, ...]]] = {}
        run.progress("inner and outer products", 0.1)
        ways: dict[str, Any] = {"method": method, "inner": "inner", "outer": "outer"}
        times["small"] = self._race(run, small, ways)
        run.progress("R-MAT beside the peers", 0.4)
        graph = self._graph(run, self.scale)
        # SciPy gives its result's pages back each time. Where the system hands pages that lie idle
        # to its host, clearing them again takes 0.1 to 0.4 s, so it runs with few others between.
        ways = {"method": method, "scipy": None}
        if importlib.util.find_spec("graphblas") is None:
            run.skip("python-graphblas is not installed", "over_graphblas")
        else:
            ways["graphblas"] = _graphblas(graph)
        times["rmat"] = self._race(run, graph, ways)
        ways = {"v1": "hash_v1", "outer": "outer", "hashed": Hash(dense_ratio=0)}
        ways["v2"] = run.pick("hash_v2", "hash_v1")
        times["versions"] = self._race(run, graph, ways)
        run.progress("grid", 0.75)
        mesh = run.remember("grid", lambda: grid(self.grid_edge))
        times["grid"] = self._race(run, mesh, {"method": method, "scipy": None})
        if importlib.util.find_spec("sklearn") is None:
            run.skip(f"no scikit-learn; {install('fields')}", "over_scipy_neighbours")
        else:
            run.progress("nearest neighbours", 0.9)
            near = run.remember("neighbours", lambda: _neighbours(self.points, run.seed))
            times["neighbours"] = self._race(run, near, {"method": method, "scipy": None})
        medians = {
            name: {way: statistics.median(each) for way, each in of.items()}
            for name, of in times.items()
        }
        roofs = {
            name: run.remember(f"roof {name}", functools.partial(_roof_s, run.context, matrix))
            for name, matrix in (("small", small), ("rmat", graph), ("grid", mesh))
        }
        fast, slow = sorted(("inner", "outer"), key=lambda way: medians["small"][way])
        for metric, name, ours, baseline, roof in (
            ("over_faster", "small", "method", fast, "small"),
            ("over_slower", "small", "method", slow, "small"),
            ("over_scipy_rmat", "rmat", "method", "scipy", "rmat"),
            ("over_scipy_grid", "grid", "method", "scipy", "grid"),
            ("over_scipy_neighbours", "neighbours", "method", "scipy", ""),
            ("over_graphblas", "rmat", "method", "graphblas", ""),
            ("v2_over_v1", "versions", "v2", "v1", "rmat"),
        ):
            if metric not in run.skipped:
                bound = medians[name][baseline] / roofs[roof] if roof else None
                run.put(metric, times[name][ours], times[name][baseline], bound=bound)
        run.profile = "; ".join(
            f"{name}: " + ", ".join(f"{way} {1e3 * s:.1f} ms" for way, s in of.items())
            for name, of in medians.items()
        )

    def _race(
        self, run: ClaimRun, matrix: csr_array, ways: dict[str, Any]
    ) -> Mapping[str, tuple[float, ...]]:
        """Each way from matrix to matrix, SciPy's left unsorted as it is."""
        from shoal.claims.lab.spgemm import spgemm

        arms: dict[str, Callable[[], object]] = {}
        for name, way in ways.items():
            if way is None:
                arms[name] = functools.partial(matrix.__matmul__, matrix)
            elif callable(way):
                arms[name] = way
            else:
                arms[name] = functools.partial(spgemm, matrix, matrix, kernel=way)
        return run.race(arms, self.pairs, swaps={}, warmup=1)


def _graphblas(matrix: csr_array) -> Callable[[], object]:
    """The same product by SuiteSparse:GraphBLAS, its matrix made before."""
    gb = importlib.import_module("graphblas")
    held = gb.io.from_scipy_sparse(matrix)

    def run() -> object:
        made = held.mxm(held, gb.semiring.plus_times).new()
        made.wait()
        return made

    return run


def _neighbours(points: int, seed: int) -> csr_array:
    """Each point of a roll and those nearest to it."""
    from sklearn.datasets import make_swiss_roll
    from sklearn.neighbors import kneighbors_graph

    place, _ = make_swiss_roll(points, random_state=seed)
    neighbours = csr_array(kneighbors_graph(place, min(_NEIGHBOURS, points - 1), mode="distance"))
    neighbours.sort_indices()
    return neighbours


def _roof_s(context: ExperimentContext, matrix: csr_array) -> float:
    """Seconds in which memory can give A and B and take C."""
    from shoal.claims.lab.spgemm.product import multiply
    from shoal.kernel.base import roof_s
    from shoal.kernel.dispatch import here
    from shoal.kernel.spgemm.call import SpGemm
    from shoal.kernel.spgemm.csr import from_any

    sides = from_any("A", matrix)
    made = multiply(sides, sides, kernel="hash")
    assert made.counters is not None
    size = matrix.shape[0]
    call = SpGemm(size, size, size, sides.nnz, sides.nnz, made.counters.multiplies, made.nnz)
    return roof_s(call, context.machine or here())


def _counters(matrix: csr_array, method: str) -> dict[str, Any]:
    import dataclasses

    from shoal.claims.lab.spgemm.product import multiply
    from shoal.kernel.spgemm.csr import from_any

    sides = from_any("A", matrix)
    result = multiply(sides, sides, kernel=method).counters
    assert result is not None
    return dataclasses.asdict(result)


def _wrong(seed: int, method: str) -> int:
    """Products of irregular matrices that are not SciPy's: pattern, or values beyond 1e-12."""
    from shoal.claims.lab.spgemm import spgemm

    wrong = 0
    for index in range(12):
        random = generator(seed, purpose="smash", index=index)
        M, K, N = (int(size) for size in random.integers(1, 400, 3))
        share = float(random.choice([0.002, 0.02, 0.2]))
        A, B = (
            csr_array(np.where(random.random(shape) < share, random.random(shape) + 0.5, 0.0))
            for shape in ((M, K), (K, N))
        )
        expected = A @ B
        expected.sort_indices()
        result = spgemm(A, B, kernel=method)
        same = np.array_equal(result.indptr, expected.indptr) and np.array_equal(
            result.indices, expected.indices
        )
        wrong += not (same and np.allclose(result.data, expected.data, rtol=1e-12, atol=0))
    return wrong


def _probes(method: str) -> tuple[float, ...]:
    """Slots looked at for a product, on columns at strides that break simple hashes."""
    from shoal.claims.lab.spgemm.product import multiply
    from shoal.kernel.spgemm.csr import from_any
    from shoal.kernel.spgemm.hash import Hash

    probes = []
    for stride in (1, 7, 64, 1000, 1024, 4096, 65_536, 1 << 20):
        col = (np.arange(2000) * stride).astype(np.int32)
        ptr = np.arange(0, 2001, 5, dtype=np.int32)
        B = csr_array((np.ones(2000), col, ptr), shape=(400, int(col[-1]) + 1))
        A = csr_array(np.ones((3, 400)))
        kernel = Hash(dense_ratio=0) if method == "hash" else method
        made = multiply(from_any("A", A), from_any("B", B), kernel=kernel)
        assert made.counters is not None
        probes.append(made.counters.probes)
    return tuple(probes)
