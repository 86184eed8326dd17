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
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le
from pydantic import JsonValue
from scipy.sparse import csr_array

from shoal.claims.catalogue import BaseClaim
from shoal.claims.lab.rmat import grid, rmat
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.measure import interleave
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.core.random import generator

__all__ = ["Smash"]

_NEIGHBOURS = 16


@part
class Smash(BaseClaim):
    """Products of sparse matrices with themselves.

    Args:
        inner_scale: R-MAT scale where inner products are tried too; they look at every pair.
        scale: R-MAT scale of the others.
        edge_factor: edges drawn per node.
        points: of the graph of nearest neighbours.
        grid_edge: of the grid.
        pairs: rounds.
    """

    inner_scale: Annotated[int, Ge(4), Le(18)] = 13
    scale: Annotated[int, Ge(4), Le(18)] = 14
    edge_factor: Annotated[int, Ge(1)] = 16
    points: Annotated[int, Ge(1)] = 20_000
    grid_edge: Annotated[int, Ge(1)] = 512
    pairs: Annotated[int, Ge(1)] = 31

    rows: ClassVar[tuple[int, ...]] = (124,)

    def refuses(self, context: ExperimentContext) -> str | None:
        """The kernels need a compiler and torch."""
        if compiler() is None:
            return "no C++ compiler for the products"
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        return None

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        method = "outer" if as_baseline else "hash"
        context.progress("counting", 0.02)
        metrics = {
            "wrong_products": PairedSamples(method=(float(_wrong(context.seed, method)),)),
            "memory_share": self._memory(context, method),
            "probes": PairedSamples(method=_probes(method)),
        }
        if quick:
            return ClaimSamples(metrics=metrics)
        return self._timed(context, metrics, method)

    def _graph(self, context: ExperimentContext, scale: int) -> csr_array:
        made = functools.partial(rmat, scale, self.edge_factor, seed=context.seed)
        return context.remember(f"rmat {scale}", made)

    def _memory(self, context: ExperimentContext, method: str) -> PairedSamples:
        """Bytes beyond the matrices, beside those of all products."""
        from shoal.claims.lab.spgemm.product import multiply
        from shoal.kernel.spgemm.csr import from_any

        graph = from_any("graph", self._graph(context, self.inner_scale))
        result = multiply(graph, graph, kernel=method).counters
        assert result is not None
        return PairedSamples(method=(result.table_bytes,), baseline=(12.0 * result.multiplies,))

    def _timed(
        self, context: ExperimentContext, metrics: dict[str, PairedSamples], method: str
    ) -> ClaimSamples:
        from shoal.kernel.spgemm.hash import Hash

        times: dict[str, Any] = {}
        context.progress("inner and outer products", 0.1)
        small = self._graph(context, self.inner_scale)
        ways: dict[str, Any] = {"method": method, "inner": "inner", "outer": "outer"}
        times["small"] = self._interleaved(context, small, ways)
        context.progress("R-MAT beside the peers", 0.4)
        graph = self._graph(context, self.scale)
        # SciPy gives its result's pages back each time. Where the system hands pages that lie idle
        # to its host, clearing them again takes 0.1 to 0.4 s, so it runs with few others between.
        ways = {"method": method, "scipy": None}
        skipped = {}
        if importlib.util.find_spec("graphblas") is None:
            skipped["over_graphblas"] = "python-graphblas is not installed"
        else:
            ways["graphblas"] = _graphblas(graph)
        times["rmat"] = self._interleaved(context, graph, ways)
        ways = {"v1": "hash_v1", "outer": "outer", "hashed": Hash(dense_ratio=0)}
        ways["v2"] = "hash_v1" if method == "outer" else "hash_v2"
        times["versions"] = self._interleaved(context, graph, ways)
        context.progress("grid", 0.75)
        mesh = context.remember("grid", lambda: grid(self.grid_edge))
        times["grid"] = self._interleaved(context, mesh, {"method": method, "scipy": None})
        if importlib.util.find_spec("sklearn") is None:
            skipped["over_scipy_neighbours"] = "no scikit-learn; install shoal-ml[bench]"
        else:
            context.progress("nearest neighbours", 0.9)
            near = context.remember("neighbours", lambda: _neighbours(self.points, context.seed))
            times["neighbours"] = self._interleaved(
                context, near, {"method": method, "scipy": None}
            )

        def pair(graph_name: str, method_name: str, baseline: str) -> PairedSamples:
            seconds = times[graph_name].seconds
            return PairedSamples(method=seconds[method_name], baseline=seconds[baseline])

        slow = sorted(("inner", "outer"), key=lambda way: times["small"].median(way).value)
        metrics["over_faster"] = pair("small", "method", slow[0])
        metrics["over_slower"] = pair("small", "method", slow[1])
        metrics["over_scipy_rmat"] = pair("rmat", "method", "scipy")
        metrics["over_scipy_grid"] = pair("grid", "method", "scipy")
        if "neighbours" in times:
            metrics["over_scipy_neighbours"] = pair("neighbours", "method", "scipy")
        if "over_graphblas" not in skipped:
            metrics["over_graphblas"] = pair("rmat", "method", "graphblas")
        metrics["v2_over_v1"] = pair("versions", "v2", "v1")
        roofs = {
            name: context.remember(f"roof {name}", functools.partial(_roof_s, context, matrix))
            for name, matrix in (("small", small), ("rmat", graph), ("grid", mesh))
        }
        medians = {
            name: {way: timed.median(way).value for way in timed.seconds}
            for name, timed in times.items()
        }
        bounds = {
            "over_faster": medians["small"][slow[0]] / roofs["small"],
            "over_slower": medians["small"][slow[1]] / roofs["small"],
            "over_scipy_rmat": medians["rmat"]["scipy"] / roofs["rmat"],
            "over_scipy_grid": medians["grid"]["scipy"] / roofs["grid"],
            "v2_over_v1": medians["versions"]["v1"] / roofs["rmat"],
        }
        details: dict[str, JsonValue] = {
            "seconds": {name: dict(of) for name, of in medians.items()},
            "roof_s": dict(roofs),
            "faster": slow[0],
            "counters": _counters(graph, method),
        }
        profile = "; ".join(
            f"{name}: " + ", ".join(f"{way} {1e3 * s:.1f} ms" for way, s in of.items())
            for name, of in medians.items()
        )
        return ClaimSamples(
            metrics=metrics, skipped=skipped, bounds=bounds, profile=profile, details=details
        )

    def _interleaved(
        self, context: ExperimentContext, matrix: csr_array, ways: dict[str, Any]
    ) -> Any:
        """Each way from matrix to matrix, SciPy's left unsorted as it is."""
        from shoal.claims.lab.spgemm import spgemm

        runs: dict[str, Callable[[], object]] = {}
        for name, way in ways.items():
            if way is None:
                runs[name] = functools.partial(matrix.__matmul__, matrix)
            elif callable(way):
                runs[name] = way
            else:
                runs[name] = functools.partial(spgemm, matrix, matrix, kernel=way)
        return interleave(runs, self.pairs, warmup=1, seed=context.seed)


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


def _counters(matrix: csr_array, method: str) -> dict[str, JsonValue]:
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
