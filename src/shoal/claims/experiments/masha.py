"""[0] MASHA: do compressed differences solve saddle points with fewer numbers sent?

Source: Beznosikov, Richtarik, Diskin, Ryabinin, Gasnikov, Distributed Methods with Compressed
Communication for Solving Variational Inequalities, with Theoretical Guarantees, 2022.

20 processes solve a quadratic saddle point of dimension and condition 100. Each method has its best
step of one grid, chosen in one process; what is counted has arrived on sockets. Naive compression
gets as many numbers as MASHA1. Then four processes train a language model adversarially.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.masha_runs import GRID, over_grid, trained, tuned
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.fields.federate.vi.setting import described_as
from shoal.fields.federate.vi.solving import ViSolution

_RAND: dict[str, Any] = {"name": "rand_k", "share": 0.05}
_TOP: dict[str, Any] = {"name": "top_k", "share": 0.05}
_METHODS: dict[str, Any] = {"extragradient": "identity", "masha1": _RAND, "masha2": _TOP}
_LM = {"name": "adversarial_lm", "characters": 6000, "width": 16, "context": 16, "radius": 0.5}
# Compressor, and iterations over those of extragradient: more of them in a fifth of the bytes.
_LM_METHODS: dict[str, tuple[Any, float]] = {
    "extragradient": ("identity", 1.0),
    "masha1": ({**_RAND, "share": 0.1}, 1.8),
}


@part
class MashaClaim(BaseClaim, row=0, needs=("torch", "safetensors")):
    """Numbers sent until a tolerance, and bytes of an adversarial training.

    Args:
        workers: of the saddle point.
        iterations: of extragradient in the adversarial training.
    """

    workers: int = 20
    iterations: int = 300

    def collect(self, run: ClaimRun) -> None:
        """Tune, solve over sockets, compare; the quick run has a smaller saddle point."""
        problem: dict[str, Any] = {"name": "quadratic_saddle"}
        workers = self.workers
        if run.quick:
            problem |= {"dimension": 40, "condition": 10}
            workers = 5
        found = {}
        for at, (method, compressor) in enumerate(_METHODS.items()):
            if run.quick and method == "masha1":  # it gains by many workers
                continue
            run.progress(method, at / 6)
            given = described_as(problem, method, workers, compressor, "identity", run.seed)
            found[method] = run.remember(method, partial(tuned, given))
        plain = found["extragradient"]
        for method in list(found)[1:]:
            run.put(f"{method}_floats", plain.up_floats / run.pick(found[method], plain).up_floats)
        run.details["saddle point"] = {name: _facts(one) for name, one in found.items()}
        if run.quick:
            return
        run.progress("compressed extragradient", 0.5)
        naive = described_as(
            problem, "compressed_extragradient", workers, _RAND, "identity", run.seed
        )
        budget = round(found["masha1"].up_floats / 10)
        stalled = run.remember("stalled", lambda: over_grid(naive, GRID, budget))
        run.put("stalls", run.pick(min(map(_error, stalled)), _error(plain)))
        run.details["compressed extragradient"] = [_facts(one) for one in stalled]
        learned = {}
        for at, (method, (compressor, times)) in enumerate(_LM_METHODS.items()):
            run.progress(f"language model, {method}", 0.6 + at / 5)
            chosen = {"name": method, "stochastic": True, "adam": True}
            given = described_as(_LM, chosen, 4, compressor, "identity", run.seed)
            learned[method] = run.remember(
                f"lm {method}", partial(trained, given, round(times * self.iterations))
            )
        plain, masha = learned["extragradient"], run.pick(*list(learned.values())[::-1])
        run.put("lm_bytes", masha.traffic.up_bytes / plain.traffic.up_bytes)
        run.put("lm_robust_loss", masha.judged["robust_loss"], plain.judged["robust_loss"])
        run.details["language model"] = {name: _facts(one) for name, one in learned.items()}


def _error(found: ViSolution) -> float:
    assert found.error is not None
    return found.error


def _facts(found: ViSolution) -> dict[str, Any]:
    sent = {"up_floats": found.up_floats, "up_bytes": found.traffic.up_bytes / found.workers}
    kept = {"step": found.step, "iterations": found.iterations, "error": found.error}
    return kept | sent | dict(found.judged)
