"""[10] ParallelAlgorithms: what, where and how much said apart, at the speed of native STREAM?

Source: Heller et al., Closing the Performance Gap with Modern C++, 2016.

The four kernels of STREAM by ``transform``, beside C with OpenMP compiled with the same flags, on
the same arrays, in turns; the triad beside NumPy and PyTorch; and a short range, where only the
overhead shows. The A/A run puts the peers in the place of the algorithms. The quick run counts:
results that are not NumPy's, threads that a short range wakes, and the sums that one array has.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.measure import interleave, num_cores
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.core.random import generator

__all__ = ["ParallelAlgorithms"]

_SHORT = 4096
_GRACE_S = 3e-6
# Calls of one sample of a short range.
_CALLS = 200


@part
class ParallelAlgorithms(BaseClaim):
    """STREAM on arrays beyond the caches.

    Args:
        elements: of each of the three arrays of fp64.
        pairs: rounds.
    """

    elements: Annotated[int, Ge(1)] = 1 << 25
    pairs: Annotated[int, Ge(1)] = 21

    rows: ClassVar[tuple[int, ...]] = (10,)

    def refuses(self, context: ExperimentContext) -> str | None:
        """The loops need a compiler, and torch's threads."""
        if compiler() is None:
            return "no C++ compiler for the loops"
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        if num_cores() < 2:
            return "one core: there is nothing to share out"
        return None

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        context.progress("counting", 0.02)
        metrics = {
            "wrong_results": PairedSamples(method=(float(_wrong(context.seed)),)),
            "threads_of_short_range": PairedSamples(method=(float(_threads(as_baseline)),)),
            "sums_of_one_array": PairedSamples(method=(float(_sums(context.seed, as_baseline)),)),
        }
        if quick:
            return ClaimSamples(metrics=metrics)
        return self._timed(context, metrics, as_baseline)

    def _timed(
        self, context: ExperimentContext, metrics: dict[str, PairedSamples], as_baseline: bool
    ) -> ClaimSamples:
        from shoal.kernel.algorithms import stream
        from shoal.kernel.dispatch import here

        held = context.remember("arrays", lambda: stream.arrays(self.elements))
        device = (context.machine or here()).device
        bandwidth = device.main_memory.read_bandwidth
        bounds: dict[str, float] = {}
        rates: dict[str, JsonValue] = {}
        for index, (name, (_, _, moved)) in enumerate(stream.KERNELS.items()):
            context.progress(f"STREAM {name}", 0.1 + 0.2 * index)
            native = stream.native(name, held)
            runs: dict[str, Callable[[], object]] = {"c": native, "own": stream.own(name, held)}
            if as_baseline:
                runs["own"] = native
            if name == "triad":
                runs |= _peers(held)
            timed = interleave(runs, self.pairs, seed=context.seed)
            metrics[name] = PairedSamples(method=timed.seconds["own"], baseline=timed.seconds["c"])
            for who in ("numpy", "torch"):
                if who in runs:
                    method = timed.seconds[who if as_baseline else "own"]
                    pair = PairedSamples(method=method, baseline=timed.seconds[who])
                    metrics[f"triad_over_{who}"] = pair
            medians = {who: timed.median(who).value for who in runs}
            rates[name] = {who: moved * self.elements / s for who, s in medians.items()}
            if bandwidth:
                roof = moved * self.elements / bandwidth
                bounds[name] = medians["c"] / roof
        context.progress("a short range", 0.95)
        metrics["short_range"], short = _short(self.pairs, context.seed, as_baseline)
        return ClaimSamples(
            metrics=metrics,
            bounds=bounds,
            profile=f"a short range: {1e6 * short['par']:.1f} us by par, "
            f"{1e6 * short['seq']:.1f} us by seq, both with checks of the call",
            details={"bytes_per_s": rates, "short_s": dict(short)},
        )


def _peers(held: dict[str, np.ndarray]) -> dict[str, Callable[[], object]]:
    """The triad as NumPy and PyTorch do it without a temporary array."""
    import torch

    from shoal.kernel.algorithms.stream import SCALAR

    a, b, c = (held[name] for name in "abc")
    tensors = [torch.from_numpy(x) for x in (a, b, c)]

    def by_numpy() -> None:
        np.multiply(c, SCALAR, out=a)
        np.add(a, b, out=a)

    run = functools.partial(torch.add, tensors[1], tensors[2], alpha=SCALAR, out=tensors[0])
    return {"numpy": by_numpy, "torch": run}


def _short(pairs: int, seed: int, as_baseline: bool) -> tuple[PairedSamples, dict[str, float]]:
    """A triad of 4096 elements by par, and in line; its seconds and 3 us are the most."""
    from shoal.kernel.algorithms import par, seq, static, transform

    a, b, out = (np.ones(_SHORT) for _ in range(3))

    def calls(policy: Any) -> None:
        for _ in range(_CALLS):
            transform(policy, a, b, out=out, f="a + s*b", s=3.0)

    chosen = par.with_(static()) if as_baseline else par
    runs = {"par": functools.partial(calls, chosen), "seq": functools.partial(calls, seq)}
    timed = interleave(runs, pairs, seed=seed)
    each = {who: tuple(s / _CALLS for s in of) for who, of in timed.seconds.items()}
    most = tuple(s + _GRACE_S for s in each["seq"])
    return PairedSamples(method=each["par"], baseline=most), {
        who: float(np.median(of)) for who, of in each.items()
    }


def _policies() -> list[Any]:
    from shoal.kernel import algorithms as alg

    executors = (alg.inline, alg.fork_join, alg.work_stealing, alg.block)
    chunks = (alg.static(), alg.static(100), alg.dynamic(), alg.guided(), alg.auto())
    return [alg.seq, *(alg.par.on(e).with_(c) for e in executors for c in chunks)]


def _wrong(seed: int) -> int:
    """Results that are not NumPy's, over algorithms, policies, chunkings and lengths."""
    from shoal.claims.lab import algorithms as lab
    from shoal.kernel import algorithms as alg

    wrong = 0
    for n in (0, 1, 4097):
        a, b = (generator(seed, purpose="stream", index=i).standard_normal(n) for i in (1, 2))
        whole = (1000 * a).astype(np.int64)
        out, ints = np.empty(n), np.empty(n, dtype=np.int64)
        expected = np.concatenate([a[a > 0], a[a <= 0]])
        steps = np.sort(whole // 100)
        for policy in _policies():
            checks = [
                np.allclose(
                    alg.transform(policy, a, b, out=out, f="a + s*b", s=3.0),
                    a + 3.0 * b,
                    rtol=1e-15,
                ),
                lab.reduce(policy, whole) == whole.sum(),
                n == 0 or lab.reduce(policy, a, "max") == a.max(),
                np.array_equal(lab.inclusive_scan(policy, whole, ints), np.cumsum(whole)),
                np.array_equal(lab.sort(policy, a.copy()), np.sort(a)),
                lab.partition(policy, a, out, "a > 0") == int((a > 0).sum()),
                np.array_equal(out, expected),
                np.array_equal(ints[: lab.unique(policy, steps, ints)], np.unique(steps)),
                np.array_equal(
                    lab.histogram(policy, a, 16, -3.0, 3.0), np.histogram(a, 16, (-3.0, 3.0))[0]
                ),
            ]
            wrong += sum(not check for check in checks)
    return wrong


def _threads(as_baseline: bool) -> float:
    """Threads that take part in a range of 4096 elements, in most of the calls.

    The first elements are timed to decide it: a call that is interrupted there takes them all.
    """
    from shoal.kernel.algorithms import par, static, transform

    who = np.zeros(_SHORT)
    policy = par.with_(static()) if as_baseline else par
    results = []
    for _ in range(9):
        transform(policy, who, out=who, f="thread()")
        results.append(len(np.unique(who)))
    return statistics.median(results)


def _sums(seed: int, as_baseline: bool) -> int:
    """Different results of one sum, over threads, executors and chunks."""
    from shoal.claims.lab import algorithms as lab
    from shoal.kernel import algorithms as alg

    a = generator(seed, purpose="stream", index=3).standard_normal(100_000)
    cores = (alg.max_cores(1), alg.max_cores(num_cores()))
    policies = [policy.with_(count) for policy in _policies()[1:] for count in cores]
    fixed = alg.deterministic(not as_baseline)
    return len({lab.reduce(policy.with_(fixed), a) for policy in policies})
