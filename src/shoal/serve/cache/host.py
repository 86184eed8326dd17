"""Tensors of the host tier, and who moves blocks between them and the cache.

Transfers are begun when a step asks for them and go on beside it, in threads of their own; the
engine waits for single transfers and never for the device. One copy moves a run of blocks in
one layer, keys and values together. On a GPU the host's memory is pinned, copies run on a
stream of their own, and each transfer ends with an event of its own.

A slower tier can be emulated: then a transfer is over when a link of the given speed, with a
lane for each direction, would have moved it.

Source: Shen et al., FastSwitch, 2024, section 4.2.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shoal.core.errors import ServeError
from shoal.ir import Copy, HostLink, Step, Transfer
from shoal.serve.cache.paged import PagedCache
from shoal.serve.engine.hooks import EngineHook, ExecutedStep

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder

# Enough for both directions, and for some that wait for others.
_THREADS = 4


class HostStore:
    """Blocks of host memory [L, 2, blocks, ...] in the layout of a cache.

    Args:
        cache: whose blocks they are for.
        num_blocks: blocks of host memory.

    Raises:
        ServeError: there is no memory for it.
    """

    def __init__(self, cache: PagedCache, num_blocks: int) -> None:
        pinned = cache.device.type == "cuda"
        self.num_blocks = num_blocks
        try:
            self.blocks = [
                torch.zeros(
                    (*one.shape[:2], num_blocks, one.shape[3]), dtype=one.dtype, pin_memory=pinned
                )
                for one in cache.blocks
            ]
        except (MemoryError, RuntimeError) as cause:
            raise ServeError(
                f"host_tokens = {num_blocks * cache.block_size}: there is no memory for the host "
                "tier; give a smaller host_tokens"
            ) from cause


class HostMover:
    """Begins transfers, waits for them and reports which are over.

    Args:
        cache: of the device.
        host: blocks of the host; not needed for transfers inside the cache.
        link: a slower tier to emulate; None copies as fast as the machine does.
        clock: s.
        sleep: waits so many s.
    """

    def __init__(
        self,
        cache: PagedCache,
        host: HostStore | None = None,
        *,
        link: HostLink | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cache, self._host, self._link = cache, host, link
        self._clock, self._sleep = clock, sleep
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shoal-mover")
        self._stream = None
        if cache.device.type == "cuda":
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        self._under_way: dict[int, Future[None]] = {}
        self._lanes: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Start to move, in this order; each after those it names."""
        for transfer in transfers:
            before = [self._under_way[one] for one in transfer.after if one in self._under_way]
            computed = None
            if self._stream is not None:
                computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
                computed.record()
            # Those it waits for were submitted before, so a thread has or had each of them.
            self._under_way[transfer.id] = self._pool.submit(self._move, transfer, before, computed)

    def wait(self, ids: Iterable[int], *, first: bool = False) -> None:
        """Until these transfers are over, or the first of them.

        Raises:
            ServeError: one of them failed.
        """
        futures = [self._under_way[one] for one in ids if one in self._under_way]
        if first:
            wait(futures, return_when=FIRST_COMPLETED)
        else:
            for future in futures:
                future.result()

    def over(self) -> frozenset[int]:
        """Transfers that have ended since the last call.

        Raises:
            ServeError: one of them failed.
        """
        done = frozenset(one for one, future in self._under_way.items() if future.done())
        for one in done:
            self._under_way.pop(one).result()
        return done

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._pool.shutdown(wait=True)

    def _move(
        self,
        transfer: Transfer,
        before: list[Future[None]],
        computed: torch.cuda.Event | None,
    ) -> None:
        for future in before:
            future.result()
        over = self._clock()
        if self._link is not None:
            with self._lock:
                over = max(over, self._lanes.get(transfer.kind, 0.0))
                over += self._link.seconds(transfer.copies)
                self._lanes[transfer.kind] = over
        if self._stream is None:
            self._copy(transfer)
        else:
            with torch.cuda.stream(self._stream):
                assert computed is not None
                self._stream.wait_event(computed)
                self._copy(transfer)
                moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
                moved.record(self._stream)
            moved.synchronize()
        left = over - self._clock()
        if left > 0:
            self._sleep(left)

    def _copy(self, transfer: Transfer) -> None:
        sources = self._tensors(transfer, host=transfer.kind == "in")
        targets = self._tensors(transfer, host=transfer.kind == "out")
        with torch.inference_mode():
            for source, target in zip(sources, targets, strict=True):
                for copy in transfer.copies:
                    _copy_run(source, target, copy)

    def _tensors(self, transfer: Transfer, *, host: bool) -> list[Tensor]:
        if not host:
            return self._cache.blocks
        if self._host is None:
            raise ServeError(
                f"transfer {transfer.id} of request {transfer.request_id}: this engine has no "
                "host tier; give it host_tokens, or preempt by recomputing"
            )
        return self._host.blocks


class HostCopyHook(EngineHook):
    """Moves blocks between cache and host as steps say, and counts what moved.

    Args:
        mover: of this process; None where others move.
        at_once: a step waits for all its transfers.
    """

    kind: ClassVar[str] = "host_copies"

    def __init__(self, mover: HostMover | None = None, *, at_once: bool = False) -> None:
        self.mover, self._at_once = mover, at_once
        self._blocks = {"out": 0, "in": 0, "own": 0}
        self._copies = 0
        self._seconds = 0.0
        self._since: dict[int, float] = {}

    def executed(self, done: ExecutedStep) -> None:
        """Count the transfers that began and ended."""
        for transfer in done.step.transfers:
            self._blocks[transfer.kind] += sum(copy.num_blocks for copy in transfer.copies)
            self._copies += len(transfer.copies)
            self._since[transfer.id] = done.started
        for over in done.result.done:
            self._seconds += done.now - self._since.pop(over)

    def metrics(self) -> Mapping[str, float]:
        """What moved since the start."""
        return {
            "swap_out_blocks_total": self._blocks["out"],
            "swap_in_blocks_total": self._blocks["in"],
            "swap_copies_total": self._copies,
            "switch_seconds_total": self._seconds,
        }

    def transfer(self, step: Step) -> None:
        """Begin the transfers of a step, and wait for what it waits for."""
        assert self.mover is not None
        self.mover.begin(step.transfers)
        if self._at_once:
            self.mover.wait(one.id for one in step.transfers)
        else:
            self.mover.wait(step.wait_for, first=not step.chunks)

    def transferred(self) -> frozenset[int]:
        """Transfers that have ended."""
        return self.mover.over() if self.mover is not None else frozenset()

    def close(self) -> None:
        """Finish what is under way."""
        if self.mover is not None:
            self.mover.close()

    def beside(self, cache: PagedCache) -> None:
        """Runners beside this one move nothing."""


def _copy_run(source: Tensor, target: Tensor, copy: Copy) -> None:
    """A run of blocks in every layer of [L, 2, blocks, ...]."""
    old = source[:, :, copy.source : copy.source + copy.num_blocks]
    new = target[:, :, copy.target : copy.target + copy.num_blocks]
    if source.device == target.device:
        new.copy_(old)
        return
    # Between devices only what lies in one piece is copied without a detour.
    for layer in range(len(new)):
        for side in range(2):
            new[layer, side].copy_(old[layer, side], non_blocking=True)


def measure_link(cache: PagedCache, host: HostStore, *, seconds: float = 0.05) -> HostLink:
    """How long copies from the cache to the host take here; overwrites the host's blocks.

    Args:
        cache: of the device.
        host: with nothing in it yet.
        seconds: about how long to measure.
    """
    layers = len(cache.blocks[0])
    block_bytes = sum(one[:, :, 0].numel() * one.element_size() for one in cache.blocks)
    long = max(1, min(cache.num_blocks, host.num_blocks, 64))
    mover = HostMover(cache, host)
    times = {}
    for number in (1, long):
        best, began = float("inf"), time.perf_counter()
        for turn in range(1000):
            start = time.perf_counter()
            mover.begin((Transfer(turn, "out", "", (Copy(0, 0, number),)),))
            mover.wait((turn,))
            best = min(best, time.perf_counter() - start)
            mover.over()
            if time.perf_counter() - began > seconds / 2:
                break
        times[number] = best
    mover.close()
    per_block = max(1e-9, (times[long] - times[1]) / max(1, long - 1))
    return HostLink(
        copy_s=max(0.0, times[1] - per_block) / layers,
        bytes_per_s=block_bytes / per_block,
        block_bytes=block_bytes,
        layers=layers,
    )


def copies_of(built: EngineBuilder) -> HostCopyHook | None:
    """The host tier of an engine; measures its link unless one is emulated."""
    tokens = built.job.host_tokens
    if not tokens:
        return None
    host = HostStore(built.cache, tokens // built.kv.block_size)
    mover = HostMover(built.cache, host, link=built.link)
    built.link = built.link or measure_link(built.cache, host)
    return HostCopyHook(mover)
