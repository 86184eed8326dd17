"""[10] ParallelAlgorithms: what, where and how much said apart, at the speed of native STREAM?

Source: Heller et al., Closing the Performance Gap with Modern C++, 2016.

The four kernels of STREAM by ``transform``, beside C with OpenMP compiled with the same flags, on
the same arrays, in turns; the triad beside NumPy and PyTorch; and a short range, where only the
overhead shows. The A/A run puts the peers in the place of the algorithms. The quick run counts:
results that are not NumPy's, threads that a short range wakes, and the sums that one array has.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.measure import num_cores
from shoal.core.parts import part
from shoal.core.random import generator

_SHORT = 4096
_GRACE_S = 3e-6
# Calls of one sample of a short range.
_CALLS = 200


@part
class ParallelAlgorithms(BaseClaim, row=10, needs=("c++", "torch"), cores=2):
    """STREAM on arrays beyond the caches.

    Args:
        elements: elements of each of the three arrays of fp64.
        pairs: rounds.
    """

    elements: Annotated[int, Ge(1)] = 1 << 25
    pairs: Annotated[int, Ge(1)] = 21

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.progress("counting", 0.02)
        run.put("wrong_results", _wrong(run.seed))
        run.put("threads_of_short_range", _threads(run.as_baseline))
        run.put("sums_of_one_array", _sums(run.seed, run.as_baseline))
        if run.quick:
            return
        from shoal.kernel.algorithms import stream
        from shoal.kernel.dispatch import here

        held = run.remember("arrays", lambda: stream.arrays(self.elements))
        device = (run.context.machine or here()).device
        bandwidth = device.main_memory.read_bandwidth
        for index, (name, (_, _, moved)) in enumerate(stream.KERNELS.items()):
            run.progress(f"STREAM {name}", 0.1 + 0.2 * index)
            arms = {"c": stream.native(name, held), "own": stream.own(name, held)}
            pairs = {name: ("own", "c")}
            if name == "triad":
                peers = _peers(held)
                arms |= peers
                pairs |= {f"triad_over_{who}": ("own", who) for who in peers}
            timed = run.versus(arms, pairs, self.pairs)
            roof = moved * self.elements / bandwidth if bandwidth else 0.0
            if roof:
                run.bounds[name] = statistics.median(timed["c"]) / roof
        run.progress("a short range", 0.95)
        _short(run, self.pairs)


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


def _short(run: ClaimRun, pairs: int) -> None:
    """A triad of 4096 elements by par, and in line; its seconds and 3 us are the most."""
    from shoal.kernel.algorithms import par, seq, static, transform

    a, b, out = (np.ones(_SHORT) for _ in range(3))

    def calls(policy: Any) -> None:
        for _ in range(_CALLS):
            transform(policy, a, b, out=out, f="a + s*b", s=3.0)

    policies = {"par": run.pick(par, par.with_(static())), "seq": seq}
    arms = {who: functools.partial(calls, policy) for who, policy in policies.items()}
    timed = run.race(arms, pairs, swaps={})
    each = {who: [s / _CALLS for s in of] for who, of in timed.items()}
    run.put("short_range", each["par"], (s + _GRACE_S for s in each["seq"]))
    short = {who: statistics.median(of) for who, of in each.items()}
    run.profile = (
        f"a short range: {1e6 * short['par']:.1f} us by par, "
        f"{1e6 * short['seq']:.1f} us by seq, both with checks of the call"
    )


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
