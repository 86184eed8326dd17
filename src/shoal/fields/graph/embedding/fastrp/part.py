"""The part ``fastrp``: powers of transitions, applied to a very sparse random projection."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.fields.graph.embedding.fastrp.model import FastRPModel
from shoal.fields.graph.embedding.fastrp.tuning import tuned
from shoal.fields.graph.embedding.protocols import EmbeddingError, EmbedWork, NodeEmbedding
from shoal.fields.graph.graph import CSRGraph, NodeLabels
from shoal.ir import Estimate, Interval, Machine

_TUNE = "tune"
# Powers that are tuned where none are given.
_START = (0.0, 1.0, 6.0, 1.0)


@part
class FastRP:
    """Mix powers of the transition matrix, each applied to a very sparse random projection.

    Source: Chen et al., Fast and Accurate Network Embeddings via Very Sparse Random Projection,
    2019, algorithm 1.

    Args:
        dim: numbers of a vector.
        weights: of the first, second ... power; "tune" chooses four on a grid of powers of 4.
        beta: exponent of the degrees in the projection: below 0, neighbours with many edges count
            less; "tune" chooses it from -1 to 1.
        q: powers; None for as many as there are weights.
        s: one in ``s`` numbers of the projection is not zero; "sqrt" for the root of the nodes.
        normalise: rows of each power have length 1 before they are mixed.
        trials: options that are tried at most, each by labels of a few nodes.
    """

    dim: Annotated[int, Ge(1), Le(65536)] = 128
    weights: tuple[float, ...] | Literal["tune"] = _START
    beta: float | Literal["tune"] = 0.0
    q: Annotated[int, Ge(1)] | None = None
    s: Annotated[float, Ge(1)] | Literal["sqrt"] = 3.0
    normalise: bool = True
    trials: Annotated[int, Ge(1), Le(20)] = 20

    def __post_init__(self) -> None:
        where = "node_embedder.fastrp"
        if self.beta != _TUNE:
            fine = math.isfinite(float(self.beta))
            require(fine, f"{where}.beta", self.beta, expected="a finite number, or tune")
        if self.s != "sqrt":
            require(
                math.isfinite(self.s), f"{where}.s", self.s, expected="a finite number, or sqrt"
            )
        weights = self._weights
        finite = bool(weights) and all(map(math.isfinite, weights))
        require(
            finite and any(weights),
            f"{where}.weights",
            self.weights,
            expected="finite numbers, one for each power, not all of them 0",
        )
        require(
            self.q in (None, len(weights)),
            f"{where}.q",
            self.q,
            expected=f"{len(weights)}, as many as there are weights",
        )

    @property
    def _weights(self) -> tuple[float, ...]:
        return _START if isinstance(self.weights, str) else self.weights

    @property
    def _tuned(self) -> bool:
        return _TUNE in (self.weights, self.beta)

    def estimate(self, work: EmbedWork, machine: Machine) -> Estimate:
        """Numbers fetched, drawn and written; twenty embeddings at most where options are tuned."""
        rates, threads = work.rates, max(work.threads, 1)
        size = float(work.num_nodes) * self.dim
        terms = {
            "projection": size * rates.draw_s / threads,
            "products": len(self._weights) * work.nnz * self.dim * rates.add_s / threads,
            "mixing": len(self._weights) * size * rates.pass_s / threads,
        }
        once = sum(terms.values())
        if self._tuned:
            # Only another beta needs its powers again.
            trials = min(self.trials, 13) if self.beta == _TUNE else 1
            solve = 20.0 * work.tuning**3 * 4e-11
            terms["tuning"] = trials * once + self.trials * solve
        return Estimate(
            step_s=Interval.around(sum(terms.values()), rates.spread * (2 if self._tuned else 1)),
            terms_s=terms,
            memory_bytes={
                "projection": size,
                # Two powers and their mixture.
                "vectors": 12.0 * size,
                "graph": 4.0 * work.nnz + 32.0 * work.num_nodes,
            },
            bound="memory",
        )

    def fit(
        self, graph: CSRGraph, *, seed: int, threads: int = 1, tuning: NodeLabels | None = None
    ) -> NodeEmbedding:
        """Choose what is to be tuned, then embed."""
        weights, beta = self._weights, self.beta
        tried: list[dict[str, Any]] = []
        if self._tuned:
            if tuning is None or len(tuning.labelled) < 2:
                raise EmbeddingError(
                    "node_embedder.fastrp: weights or beta = 'tune', and no labels to tune by; "
                    "give a graph with labels, or numbers"
                )
            weights, beta, tried = tuned(
                graph, tuning, weights=weights, beta=None if isinstance(beta, str) else beta,
                free=self.weights == _TUNE, trials=self.trials, seed=seed, threads=threads,
                dim=self.dim, s=self.s, normalise=self.normalise,
            )  # fmt: skip
        model = self.model(graph, weights=weights, beta=float(beta), seed=seed, threads=threads)
        return NodeEmbedding(
            vectors=model.vectors,
            isolated=model.isolated,
            details={"weights": list(weights), "beta": float(beta), "tried": tried},
        )

    def model(
        self,
        graph: CSRGraph,
        *,
        seed: int = 0,
        threads: int = 1,
        weights: tuple[float, ...] | None = None,
        beta: float | None = None,
        keep: bool = False,
    ) -> FastRPModel:
        """The model, to which edges can be added if it keeps its powers.

        Args:
            graph: with N nodes.
            seed: of the projection.
            threads: that work.
            weights: in place of those of the part.
            beta: in place of that of the part.
            keep: the powers.

        Raises:
            EmbeddingError: an option is still to be tuned.
        """
        mix, power = weights or self.weights, self.beta if beta is None else beta
        if isinstance(mix, str) or isinstance(power, str):
            raise EmbeddingError("node_embedder.fastrp: a model needs numbers; fit tunes")
        return FastRPModel(
            graph, dim=self.dim, weights=mix, beta=power, s=self.s, normalise=self.normalise,
            seed=seed, threads=threads, keep=keep,
        )  # fmt: skip
