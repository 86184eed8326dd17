"""Arms on several ranks: one start of the processes, arms in turn, the slowest rank's seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.random import generator

if TYPE_CHECKING:
    from shoal.machine.emulate import EmulatedNetwork
    from shoal.parallel.protocols import Comm


def on_ranks(
    target: str,
    world: int,
    *,
    network: EmulatedNetwork | None = None,
    hosts: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    timeout_s: float = 120.0,
    **arguments: Any,
) -> list[Any]:
    """Call ``target`` on new processes of one thread; what each of them returned.

    Args:
        target: ``module:function``, called as ``function(comm, **arguments)``.
        world: number of ranks.
        network: whose hosts the ranks are on; here if not given.
        hosts: of each rank; as many neighbours on each host as on the others, if not given.
        ranks_per_node: ranks that count as one node's; those of a host, if not given.
        timeout_s: s after which they must have ended.
        arguments: plain JSON, jobs, models and other values.
    """
    from shoal.parallel.comm.processes import run_processes

    start = None
    if network is not None:
        per_host = world // len(network.names)
        ranks_per_node = ranks_per_node or per_host
        places = hosts or [rank // per_host for rank in range(world)]
        start = lambda rank, command, **how: network.start(places[rank], command, **how)  # noqa: E731
    return run_processes(
        target, world, arguments, timeout_s=timeout_s, ranks_per_node=ranks_per_node, start=start
    )


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]], arm: str) -> tuple[float, ...]:
    """Seconds of an arm by round, of the rank that was slowest in it."""
    return tuple(map(max, zip(*(rank[arm] for rank in ranks), strict=True)))


def in_turn(
    comm: Comm,
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    ready: Callable[[str], object] = lambda name: None,
    together: bool = True,
    seed: int | None = None,
) -> dict[str, list[float]]:
    """Seconds of each arm by round, on this rank: all ranks begin an arm together.

    Args:
        comm: the ranks.
        arms: name -> what is timed.
        rounds: how many.
        warmup: rounds before, not timed.
        ready: called with an arm's name before it, not timed.
        together: an arm ends when it has ended on all ranks.
        seed: of a random order in every round; every other round backwards if not given, so that
            drift favours none.
    """
    names, seconds = list(arms), {name: list[float]() for name in arms}
    for turn in range(-warmup, rounds):
        order = names[:: 1 if turn % 2 else -1]
        if seed is not None:
            draws = generator(seed, purpose="steps in turn", step=turn + warmup)
            order = [names[at] for at in draws.permutation(len(names))]
        for name in order:
            ready(name)
            comm.barrier()
            begin = time.perf_counter()
            arms[name]()
            if together:
                comm.barrier()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds
