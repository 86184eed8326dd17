"""How a window slides along a chain of blocks, and what that costs.

:class:`Slide` says which blocks are on the device when. It knows no tensors: a model's runner asks
it, and :func:`rehearse` asks it with the times of blocks instead, to predict peak and time.

Source: Superpipeline, 2024: a window of k blocks, of which k' are replaced at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.core.sizes import human_bytes
from shoal.memory.tiers.tier import TierAllocator

_ROUNDS = 3
_AS_FAST = 1.02  # what is nearer than this is no slower
_BACKWARD = 2.0  # times of a block's forward pass


class WindowMove(NamedTuple):
    """A change of the window.

    Args:
        wanted: blocks on the device from now on, those that are needed first in front.
        leaving: blocks that go now even if they are wanted again.
    """

    wanted: list[int]
    leaving: list[int]


@dataclass(frozen=True)
class Slide:
    """Where the window is.

    Args:
        n: blocks of the chain.
        k: blocks of the window.
        k_prime: blocks that are replaced at a time.

    Raises:
        ConfigError: not 1 <= k_prime <= k <= n.
    """

    n: int
    k: int
    k_prime: int

    def __post_init__(self) -> None:
        require(
            1 <= self.k <= self.n,
            "superpipeline.k",
            self.k,
            expected=f"1 to {self.n}, the blocks of the model",
        )
        require(
            1 <= self.k_prime <= self.k,
            "superpipeline.k_prime",
            self.k_prime,
            expected=f"1 to k = {self.k}",
        )

    def first(self) -> list[int]:
        """The window before anything runs."""
        return list(range(self.k))

    def from_here(self, block: int, *, backward: bool = False) -> list[int]:
        """The window for a run that is at a block, which lies in it."""
        if backward:
            top = max(block, self.k - 1)
            return list(range(top, top - self.k, -1))
        low = min(block, self.n - self.k)
        return list(range(low, low + self.k))

    def after_forward(self, block: int, *, training: bool) -> WindowMove | None:
        """What changes when a block's forward pass is over.

        Without a backward pass the window wraps around to the first blocks for the next pass.
        Before a backward pass it stays at the end of the chain.
        """
        if self.k == self.n or not self._due(block + 1):
            return None
        done = range(block + 1 - self._step(block + 1), block + 1)
        if not training:
            wanted = [(block + 1 + i) % self.n for i in range(self.k)]
            return WindowMove(wanted, list(done))
        wanted = self.from_here(block + 1)
        return WindowMove(wanted, [b for b in done if b < wanted[0]])

    def before_backward(self, block: int) -> WindowMove | None:
        """What changes when a block's backward pass begins."""
        through = self.n - 1 - block
        if self.k == self.n or not through or not self._due(through):
            return None
        return WindowMove(self.from_here(block, backward=True), [])

    def _due(self, count: int) -> bool:
        """Whether blocks are replaced after so many: k' at a time, and what is left at the end."""
        return count % self.k_prime == 0 or count == self.n

    def _step(self, count: int) -> int:
        return count % self.k_prime or self.k_prime


class Rehearsal(NamedTuple):
    """What a window costs.

    Args:
        peak_bytes: most bytes of blocks on the device.
        span_bytes: memory in which they find room; more than the peak where blocks of different
            sizes leave holes.
        seconds: seconds of a forward pass, or of a forward and backward pass, in steady state.
        loads: blocks that are loaded in it.
        stall_s: s of it in which a block is waited for.
    """

    peak_bytes: int
    span_bytes: int
    seconds: float
    loads: int
    stall_s: float


def rehearse(
    slide: Slide,
    sizes: Sequence[int],
    compute_s: Sequence[float],
    load_s: Sequence[float],
    *,
    training: bool = False,
) -> Rehearsal:
    """Slide along the chain with numbers instead of tensors.

    Args:
        slide: the window.
        sizes: bytes of every block.
        compute_s: s of every block's forward pass; backward takes twice as long.
        load_s: s in which every block is brought, one after another.
        training: there and back; weights change at the end of it, so the window is loaded again.
    """
    ledger = TierAllocator("device", sum(-(-size // 256) * 256 for size in sizes) * 2 + 256)
    held: dict[int, tuple[object, float]] = {}
    now = link = stall = 0.0
    loads = span = 0

    def change(wanted: Sequence[int], leaving: Sequence[int]) -> None:
        nonlocal link, loads, span
        keep = set(wanted) - set(leaving)
        for block in sorted(held.keys() - keep):
            ledger.free(held.pop(block)[0])  # type: ignore[arg-type]
        for block in wanted:
            if block not in held:
                place = ledger.alloc(sizes[block], str(block))
                span = max(span, place.start + ledger.rounded(place.nbytes))
                link = max(link, now) + load_s[block]
                held[block] = (place, link)
                loads += 1

    def run(block: int, seconds: float) -> None:
        nonlocal now, stall
        wait = max(0.0, held[block][1] - now)
        stall += wait
        now += wait + seconds

    before = (0.0, 0, 0.0)
    change(slide.first(), [])
    for _ in range(_ROUNDS):
        before = (now, loads, stall)
        for block in range(slide.n):
            run(block, compute_s[block])
            move = slide.after_forward(block, training=training)
            if move is not None:
                change(*move)
        for block in reversed(range(slide.n)) if training else ():
            move = slide.before_backward(block)
            if move is not None:
                change(*move)
            run(block, _BACKWARD * compute_s[block])
        if training and slide.k < slide.n:
            change([], [])
            change(slide.first(), [])
    return Rehearsal(ledger.stats.peak, span, now - before[0], loads - before[1], stall - before[2])


class Cell(NamedTuple):
    """One window and what it is predicted to cost."""

    k: int
    k_prime: int
    cost: Rehearsal


def sweep(
    sizes: Sequence[int],
    compute_s: Sequence[float],
    load_s: Sequence[float],
    *,
    training: bool = False,
) -> list[Cell]:
    """Every window of a chain: all k, and for each all k' up to k."""
    n = len(sizes)
    return [
        Cell(k, step, rehearse(Slide(n, k, step), sizes, compute_s, load_s, training=training))
        for k in range(1, n + 1)
        for step in ([1] if k == n else range(1, k + 1))
    ]


def choose(
    cells: Sequence[Cell],
    *,
    goal: float = 1.1,
    budget: int | None = None,
) -> Cell:
    """The smallest window that is fast enough; of one size the fastest.

    Args:
        cells: of :func:`sweep`.
        goal: most time as a multiple of that with all blocks resident.
        budget: most bytes of blocks on the device.

    Returns:
        What meets both; where nothing within the budget is fast enough, what is as fast as any.

    Raises:
        PlanError: no window fits; says what the smallest needs.
    """
    resident = max(cells, key=lambda cell: cell.k).cost.seconds
    fit = [cell for cell in cells if budget is None or cell.cost.span_bytes <= budget]
    if not fit:
        least = min(cells, key=lambda cell: cell.cost.span_bytes)
        raise PlanError(
            f"superpipeline: {human_bytes(budget or 0)} are left for blocks; the smallest window, "
            f"k = {least.k}, needs {human_bytes(least.cost.span_bytes)}; raise device_budget"
        )
    fast = [cell for cell in fit if cell.cost.seconds <= goal * resident]
    if not fast:
        best = min(cell.cost.seconds for cell in fit)
        fast = [cell for cell in fit if cell.cost.seconds <= _AS_FAST * best]
    return min(fast, key=lambda cell: (cell.k, cell.cost.seconds, cell.k_prime))
