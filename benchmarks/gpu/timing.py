"""Methods in turn on a GPU: rounds in a random order, timed by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpu.place import Place
from shoal.core.measure import PairedTimes, interleave
from shoal.machine.probes.kernel_torch import repeated

_BATCH_S = 4e-3


def elapsed(place: Place, call: Callable[[], object]) -> float:
    """Seconds of a call: between two events on the GPU, both waited for."""
    if place.dry:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def in_turn(
    place: Place,
    methods: Mapping[str, Callable[[], float]],
    rounds: int = 7,
    warmup: int = 1,
) -> PairedTimes:
    """Methods that time themselves: rounds in an order that changes, after a warm-up.

    Args:
        place: where.
        methods: name -> seconds.
        rounds: that count; one in a dry run.
        warmup: that do not; none in a dry run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}

    def noted(name: str, method: Callable[[], float]) -> Callable[[], None]:
        return lambda: seconds[name].append(method())

    # The order is that of the one frame of paired measurements; the seconds are the methods' own.
    rounds, warmup = place.pick((rounds, warmup), (1, 0))
    interleave({n: noted(n, m) for n, m in methods.items()}, rounds, warmup=warmup)
    return PairedTimes({name: tuple(taken[warmup:]) for name, taken in seconds.items()})


def timed(
    place: Place, methods: Mapping[str, Callable[[], object]], rounds: int = 7
) -> dict[str, Any]:
    """Kernels in turn, the first against the others.

    Many calls of one are replayed from a graph, where it can be recorded, so that no launch of the
    host counts; ``graphs`` says which are.
    """
    batches: dict[str, Callable[[], float]] = {}
    graphs = []
    for name, call in methods.items():
        times = 1
        if not place.dry:
            elapsed(place, call)
            times = max(1, min(1000, round(_BATCH_S / elapsed(place, call))))
        run, replayed = repeated(call, times, "cuda" if _recordable(place, call) else "cpu")
        batches[name] = lambda run=run, times=times: elapsed(place, run) / times  # type: ignore[misc]
        graphs += [name] if replayed else []
    return {**judged(in_turn(place, batches, rounds)), "graphs": graphs}


def _recordable(place: Place, call: Callable[[], object]) -> bool:
    """Whether a call never waits for the GPU; one that does would leave a recording broken."""
    if place.dry:
        return False
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def judged(paired: PairedTimes) -> dict[str, Any]:
    """Seconds of the first method, and the time of each other over its, with 90 % intervals."""
    first, *others = paired.seconds
    own = paired.median(first)
    beside = {name: paired.ratio(name, first) for name in others}
    return {
        "seconds": own.value,
        "low": own.low,
        "high": own.high,
        "beside": {n: {"value": r.value, "low": r.low, "high": r.high} for n, r in beside.items()},
        "samples": {name: list(taken) for name, taken in paired.seconds.items()},
    }
