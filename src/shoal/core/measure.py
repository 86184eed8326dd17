"""Measuring on a machine that is never quite quiet.

Times of different minutes cannot be compared; times taken turn by turn can. Methods are
run interleaved, in an order that changes from round to round, and compared as the median
of the ratios within each round, with a bootstrap interval. A machine that is busy with
something else is refused.

Source: Efron, Bootstrap Methods: Another Look at the Jackknife, 1979 (percentile interval).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.core.errors import NoisyMachineError, require
from shoal.core.random import generator

Statistic = Callable[[np.ndarray], np.ndarray]

# A quiet machine stays well below these; on few cores one more busy process does not.
MAX_OTHERS = 0.25  # of all cores
MAX_STEAL = 0.02
MAX_SPIN_SPREAD = 0.10
# Samples that are drawn and judged at a time.
_CELLS = 2**16
# Of a second, in /proc.
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Spread:
    """A number with its 90 % bootstrap interval, all in one unit."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a share of the value."""
        if self.high == self.low:
            return 0.0
        return (self.high - self.low) / 2 / abs(self.value) if self.value else float("inf")


def bootstrap(
    samples: Sequence[float] | np.ndarray,
    statistic: Statistic | None = None,
    *,
    seed: int = 0,
    resamples: int = 2000,
) -> Spread:
    """The statistic of ``samples`` and the 5th and 95th percentile over resamples.

    Args:
        samples: [N] numbers.
        statistic: [R, N] -> [R], over the last dimension; the median if not given.
        seed: the same samples and seed give the same interval.
        resamples: R.

    Raises:
        ConfigError: there are no samples.
    """
    values_N = np.asarray(samples, dtype=np.float64)
    require(
        values_N.ndim == 1 and values_N.size > 0,
        "measure.samples",
        list(values_N.shape),
        expected="at least one number",
    )
    of = statistic if statistic is not None else _median
    value = float(of(values_N[None, :])[0])
    # Some rows at a time, which the caches of a processor hold; the draws are those of all at once.
    source, rows = generator(seed, purpose="bootstrap"), max(1, _CELLS // values_N.size)
    statistics = [
        of(values_N[source.integers(0, values_N.size, (min(rows, resamples - row), values_N.size))])
        for row in range(0, resamples, rows)
    ]
    low, high = np.percentile(np.concatenate(statistics), [5, 95])
    # With few samples the point can lie just outside the percentiles.
    return Spread(value, min(float(low), value), max(float(high), value))


def _median(values_RN: np.ndarray) -> np.ndarray:
    return np.asarray(np.median(values_RN, axis=-1))


@dataclass(frozen=True)
class PairedTimes:
    """Raw seconds of interleaved methods.

    Args:
        seconds: method -> seconds of each round, in the order of the rounds.
        seed: seed of the intervals.
    """

    seconds: Mapping[str, tuple[float, ...]]
    seed: int = 0
    order: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    def median(self, method: str) -> Spread:
        """Median seconds of one method."""
        return bootstrap(self._of(method), seed=self.seed)

    def ratio(self, a: str, b: str) -> Spread:
        """Median over the rounds of seconds of ``a`` / seconds of ``b``."""
        return bootstrap(np.divide(self._of(a), self._of(b)), seed=self.seed)

    def _of(self, method: str) -> tuple[float, ...]:
        require(
            method in self.seconds,
            "measure.method",
            method,
            expected=f"one of {', '.join(self.seconds)}",
        )
        return self.seconds[method]


def interleave(
    methods: Mapping[str, Callable[[], object]],
    pairs: int = 15,
    *,
    warmup: int = 2,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, float], None] | None = None,
) -> PairedTimes:
    """Time the methods in turn, ``pairs`` rounds, each round in a new random order.

    Args:
        methods: name -> what is timed; a result that is lazy must be waited for inside.
        pairs: rounds, at least 1.
        warmup: untimed rounds before.
        seed: seed of the order and of the intervals.
        clock: seconds; the tests give a virtual one.
        progress: called with (text, share done).

    Raises:
        ConfigError: no methods, or no rounds.
    """
    require(bool(methods), "measure.methods", sorted(methods), expected="at least one method")
    require(pairs >= 1, "measure.pairs", pairs, expected="at least 1")
    names = list(methods)
    for _ in range(warmup):
        for name in names:
            methods[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order: list[tuple[str, ...]] = []
    for turn in range(pairs):
        shuffled = generator(seed, purpose="interleave", step=turn).permutation(len(names))
        order.append(tuple(names[index] for index in shuffled))
        for name in order[-1]:
            start = clock()
            methods[name]()
            seconds[name].append(clock() - start)
        if progress is not None:
            progress(f"round {turn + 1} of {pairs}", (turn + 1) / pairs)
    return PairedTimes({name: tuple(taken) for name, taken in seconds.items()}, seed, tuple(order))


def num_cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_quiet(
    *,
    wait_s: float = 0.0,
    poll_s: float = 2.0,
    waiting: Callable[[str, float], None] | None = None,
    hint: str = "",
) -> None:
    """Refuse a machine that is busy with something else.

    Args:
        wait_s: how long to wait for it to calm down.
        poll_s: s between two looks.
        waiting: called after each look at a busy machine with (why, s left), at once the first
            time.
        hint: how to measure all the same, for the end of the error.

    Raises:
        NoisyMachineError: still busy after ``wait_s``; says with what.
    """
    deadline = time.monotonic() + wait_s
    while reasons := noise_reasons():
        left = deadline - time.monotonic()
        why = "; ".join(reasons)
        if left <= 0:
            more = f", or {hint}" if hint else ""
            raise NoisyMachineError(
                f"the machine is too busy for measurements: {why}; end other programs, or measure "
                f"later{more}"
            )
        if waiting is not None:
            waiting(why, left)
        time.sleep(min(poll_s, left))


def noise_reasons(*, spin: Callable[[], float] | None = None, window_s: float = 0.5) -> list[str]:
    """Why a timing taken now would mean little; empty on a quiet machine.

    Looks at what other processes use of the processors now, at time stolen by the
    hypervisor, and at how evenly a fixed loop runs. The load average is only reported:
    it remembers a minute that is over.

    Args:
        spin: seconds of one run of a fixed amount of work.
        window_s: s over which the use of the processors is observed.
    """
    reasons = []
    before, own_before = _cpu_times(), _own_seconds()
    time.sleep(window_s)
    after, own_after = _cpu_times(), _own_seconds()
    if before is not None and after is not None:
        total = max(1e-9, after.total - before.total)
        cores = after.num_cores
        busy_cores = (after.busy - before.busy) / total * cores
        others_cores = busy_cores - (own_after - own_before) / max(1e-9, window_s)
        if others_cores > MAX_OTHERS * cores:
            load = os.getloadavg()[0]
            reasons.append(
                f"other processes keep {others_cores:.1f} of {cores} cores busy "
                f"(load average {load:.1f})"
            )
        steal = (after.steal - before.steal) / total
        if steal > MAX_STEAL:
            reasons.append(f"the hypervisor takes {steal:.0%} of the processor time away")
    run = spin if spin is not None else _spin
    times = np.array([run() for _ in range(15)])
    spread = float(np.percentile(times, 80) / np.min(times) - 1)
    if spread > MAX_SPIN_SPREAD:
        reasons.append(f"a fixed loop takes up to {spread:.0%} longer from one run to the next")
    return reasons


class BackgroundLoad:
    """What others, and the hypervisor, take of the processors from now on.

    Args:
        pids: processes that are not others, beside this one.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = tuple(pids)
        self._before, self._own = _cpu_times(), self._own_ticks()

    def share(self) -> float:
        """Share of all processors that was theirs until now; 0 where there is no /proc."""
        now, own = _cpu_times(), self._own_ticks()
        if self._before is None or now is None or now.total <= self._before.total:
            return 0.0
        taken = now.busy + now.steal - self._before.busy - self._before.steal - (own - self._own)
        return max(0.0, taken / (now.total - self._before.total))

    def _own_ticks(self) -> float:
        """In ticks, as /proc counts."""
        own_ticks = _own_seconds() * _TICKS
        for pid in self._pids:
            try:
                said = Path(f"/proc/{pid}/stat").read_text()
            except OSError:  # it has ended
                continue
            # The name before may hold spaces; user and system are the 14th and 15th field.
            own_ticks += sum(map(float, said.rpartition(")")[2].split()[11:13]))
        return own_ticks


@dataclass(frozen=True)
class _CpuTimes:
    total: float
    busy: float
    steal: float
    num_cores: int


def _cpu_times(path: Path = Path("/proc/stat")) -> _CpuTimes | None:
    """Times of all processors since boot in ticks, or None where there is no /proc."""
    if not path.exists():
        return None
    lines = path.read_text().splitlines()
    user, nice, system, idle, iowait, irq, softirq, steal = map(float, lines[0].split()[1:9])
    busy = user + nice + system + irq + softirq
    num_cores = sum(1 for line in lines if line.startswith("cpu")) - 1
    return _CpuTimes(busy + idle + iowait + steal, busy, steal, num_cores)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _spin() -> float:
    start = time.perf_counter()
    total = 0
    for number in range(100_000):
        total += number & 7
    return time.perf_counter() - start
