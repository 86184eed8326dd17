"""A model that runs with a window of its blocks on the device.

Any model with a chain of blocks (:mod:`shoal.memory.streaming.chain`), in inference and in
training: its embedding, its head and whatever else is no block stay on the device; of the blocks, k
are there. When k' of them have run, they are released and the next k' start loading while those
between run. Without a backward pass the window goes round; with one it comes back, and each block's
gradients go home with it. The weights on the host are the true ones: optimizers, checkpoints and
``state_dict`` see them, and what they change is loaded again.

Source: Superpipeline: A Universal Approach for Reducing GPU Memory Usage in Large Models, 2024.
Differs: what is left of the last k' is released at the end of the chain, so that every pass loads
every block once, whatever k' divides.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from shoal.core.errors import PlanError, require
from shoal.core.sizes import human_bytes
from shoal.memory.activations.protocol import ResidentTensor, in_backward
from shoal.memory.streaming.slide import Cell, Rehearsal, Slide, WindowMove, choose, rehearse, sweep

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.memory.streaming.chain import BlockChain
    from shoal.memory.streaming.window import Window, WindowStats
    from shoal.memory.tiers.mover import EmulatedLink
    from shoal.memory.tiers.tier import BudgetedTier, TierBlock


@dataclass(frozen=True)
class SuperpipelineReport:
    """What lies where.

    Args:
        blocks: names of the blocks.
        how: how they were found: container or trace.
        pinned: what stays on the device, by name, in bytes.
        shared: of these, what several blocks have.
        block_bytes: of every block.
        k: blocks of the window.
        k_prime: blocks that are replaced at a time.
        peak_bytes: most bytes of weights on the device.
    """

    blocks: tuple[str, ...]
    how: str
    pinned: dict[str, int]
    shared: tuple[str, ...]
    block_bytes: tuple[int, ...]
    k: int
    k_prime: int
    peak_bytes: int

    def __str__(self) -> str:
        whole = sum(self.block_bytes) + sum(self.pinned.values())
        text = (
            f"{len(self.blocks)} blocks by {self.how}, {self.blocks[0]} to {self.blocks[-1]}; "
            f"k = {self.k}, k' = {self.k_prime}: {human_bytes(self.peak_bytes)} of weights on the "
            f"device at most, of {human_bytes(whole)}"
        )
        if self.shared:
            text += f"; shared between blocks and kept there: {', '.join(self.shared)}"
        return text


def wrap(
    model: nn.Module,
    k: int | Literal["auto"] = "auto",
    k_prime: int | None = None,
    *,
    tier: BudgetedTier | None = None,
    device: str | None = None,
    device_budget: int | None = None,
    goal: float = 1.1,
    chain: str = "",
    link: EmulatedLink | None = None,
    overlap: bool = True,
    methods: Sequence[str] = ("forward",),
) -> SuperpipelineModel:
    """Let a model run with a window of its blocks on the device; it is called as before.

    Args:
        model: any module with its weights on the host; changed in place until ``close``.
        k: blocks on the device; ``auto`` takes the smallest window that is fast enough, once the
            first pass has been measured.
        k_prime: blocks that are replaced at a time; half of k, if not given.
        tier: memory of the device; one of its own, if not given.
        device: where the tier is made: a GPU if there is one, else the host.
        device_budget: most bytes of weights on the device.
        goal: with auto, most time as a multiple of that with all blocks resident.
        chain: names of the containers of blocks, in order; found, if not given.
        link: holds copies to a rate.
        overlap: blocks come while others run; otherwise a window that moves is waited for, which
            is what overlapping is compared with.
        methods: of a block, those that compute with its weights.

    Raises:
        ConfigError: not 1 <= k_prime <= k <= blocks.
        ModelError: the model has no chain of blocks.
        PlanError: the budget is too small; says what is needed.
    """
    import torch

    from shoal.memory.streaming.chain import find_chain

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    result = find_chain(model, chain)
    if k != "auto":
        Slide(len(result), k, k_prime or max(1, k // 2))
    require(goal >= 1, "superpipeline.goal", goal, expected="at least 1")
    return SuperpipelineModel(
        model,
        result,
        k=None if k == "auto" else k,
        k_prime=k_prime,
        tier=tier,
        device=device,
        budget=device_budget,
        goal=goal,
        link=link,
        overlap=overlap,
        methods=tuple(methods),
    )


class SuperpipelineModel:
    """A wrapped model; see :func:`wrap`.

    Attributes:
        tier: where its weights lie when it computes.
        slide: the window; None before ``auto`` has chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        chain: BlockChain,
        *,
        k: int | None,
        k_prime: int | None,
        tier: BudgetedTier | None,
        device: str,
        budget: int | None,
        goal: float,
        link: EmulatedLink | None,
        overlap: bool,
        methods: tuple[str, ...],
    ) -> None:
        from shoal.memory.streaming.window import Window, packed_bytes, pin
        from shoal.memory.tiers.tier import ALIGNMENT, BudgetedTier

        self.model, self.chain = model, chain
        self._goal, self._methods = goal, methods
        streamed = {id(p) for each in chain.streamed for p in each}
        rest: list[tuple[str, Tensor]] = [
            *((n, p) for n, p in model.named_parameters() if id(p) not in streamed),
            *model.named_buffers(),
        ]
        self._sizes = [_rounded(packed_bytes(each), ALIGNMENT) for each in chain.streamed]
        self._pinned_bytes = {name: _rounded(t.nbytes, ALIGNMENT) for name, t in rest}
        kept = sum(self._pinned_bytes.values())
        self._room = None if budget is None else budget - kept
        n = len(chain)
        # Until times are known, auto takes the smallest window that can overlap.
        first = Slide(n, k, k_prime or max(1, k // 2)) if k is not None else Slide(n, 2, 1)
        if k is None and self._room is not None and self._span(first) > self._room:
            first = Slide(n, 1, 1)
        if self._room is not None and self._span(first) > self._room:
            raise PlanError(
                f"superpipeline: k = {first.k}, k' = {first.k_prime} needs "
                f"{human_bytes(self._span(first))} for blocks and {human_bytes(kept)} for what is "
                f"no block; device_budget is {human_bytes(budget or 0)}"
            )
        if tier is None:
            most = sum(self._sizes) if k is None else self._span(first)
            capacity = kept + most if budget is None else budget
            tier = BudgetedTier("device", capacity, device)
        self.tier = tier
        self._pinned: dict[str, tuple[Tensor, TierBlock]] = pin(rest, tier)
        self._of = dict(rest)
        self.window: Window = Window(chain, tier, link=link, overlap=overlap)
        self.slide = first
        self._measuring = k is None
        self._compute_s: dict[int, float] = {}
        self._backward = False
        self._whole = False
        # Methods of blocks that are ours, and what the block itself had in their place.
        self._patched: list[tuple[nn.Module, str, Any]] = []
        self._settle(first)

    @property
    def stats(self) -> WindowStats:
        """What the window has done."""
        return self.window.stats

    @property
    def report(self) -> SuperpipelineReport:
        """What lies where."""
        peak = self._rehearsed(self.slide).peak_bytes
        return SuperpipelineReport(
            blocks=self.chain.names,
            how=self.chain.how,
            pinned=dict(self._pinned_bytes),
            shared=self.chain.shared,
            block_bytes=tuple(self._sizes),
            k=self.slide.k,
            k_prime=self.slide.k_prime,
            peak_bytes=sum(self._pinned_bytes.values()) + peak,
        )

    def sweep(self, *, training: bool = False) -> list[Cell]:
        """Predicted peak and time of every window, by the times that were measured.

        Raises:
            PlanError: no pass has run yet, or none with a window that moved.
        """
        n = len(self.chain)
        if len(self._compute_s) < n or len(self.window.load_s) < n:
            raise PlanError("superpipeline: nothing is measured yet; run the model once")
        compute = [self._compute_s[i] for i in range(n)]
        loads = [self.window.load_s[i] for i in range(n)]
        return sweep(self._sizes, compute, loads, training=training)

    def resize(self, k: int, k_prime: int) -> None:
        """Another window from now on; between passes."""
        slide = Slide(len(self.chain), k, k_prime)
        self._unsettle()
        self.window.drop_all()
        self._settle(slide)

    def refresh(self) -> None:
        """Load every block again: its weights were written in a way that torch did not see.

        What operators of torch write is noticed; ``tensor.data`` and kernels by address are not.
        """
        self.window.move([])

    def close(self) -> None:
        """The model as it was, with all of its weights on the host."""
        self._unsettle()
        self.window.close()
        for name, (before, block) in self._pinned.items():
            tensor = self._of[name]
            before.copy_(tensor.detach())
            tensor.data = before
            self.tier.free(block)
        self._pinned.clear()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _rehearsed(self, slide: Slide, *, training: bool = False) -> Rehearsal:
        nothing = [0.0] * slide.n
        return rehearse(slide, self._sizes, nothing, nothing, training=training)

    def _span(self, slide: Slide) -> int:
        """Memory for the window, whether it goes round or there and back."""
        return max(self._rehearsed(slide, training=each).span_bytes for each in (False, True))

    def _settle(self, slide: Slide) -> None:
        """Load the first window, and make the blocks report where the run is."""
        self._unsettle()
        self.slide = slide
        self.window.move(slide.first())
        if slide.k == slide.n:
            # All blocks stay: they are entered once, and nothing is asked of the model any more.
            for number in range(slide.n):
                self.window.enter(number)
            self._whole = True
            return
        for number, block in enumerate(self.chain.blocks):
            for name in self._methods:
                inner = getattr(block, name)
                self._patched.append((block, name, vars(block).get(name)))
                run = functools.partial(self._run, number, inner)
                setattr(block, name, functools.wraps(inner)(run))

    def _unsettle(self) -> None:
        """The blocks as they were, their parameters on the host."""
        for block, name, before in self._patched:
            delattr(block, name)
            if before is not None:
                setattr(block, name, before)
        self._patched.clear()
        for number in range(self.slide.n if self._whole else 0):
            self.window.leave(number)
        self._whole = False

    def _run(self, number: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward pass, the first one or one that is repeated in the backward pass."""
        again = in_backward()
        if again:
            self._fetch(number)
        else:
            self._before_forward(number)
        window = self.window
        window.enter(number)
        began = time.perf_counter()
        try:
            with self._saving(), _no_cast_is_kept():
                result = inner(*args, **kwargs)
            self._took(number, began)
        finally:
            window.leave(number)
        training = self._watch(number, result)
        if not again:
            self._change(self.slide.after_forward(number, training=training))
        return result

    def _took(self, number: int, began: float) -> None:
        if not self._measuring:
            return
        if self.tier.device.type == "cuda":
            import torch

            torch.cuda.current_stream().synchronize()
        self._compute_s[number] = time.perf_counter() - began

    def _before_forward(self, number: int) -> None:
        if self._measuring and number == 0 and len(self._compute_s) == len(self.chain):
            self._measuring = False
            cells = self.sweep()
            # A first pass is slower than others, and a tier that is given may be small.
            room = self.tier.room + sum(self._sizes[b] for b in self.window.resident)
            budget = room if self._room is None else min(room, self._room)
            chosen = choose(cells, goal=self._goal, budget=budget)
            self.resize(chosen.k, chosen.k_prime)
        if self._backward:  # the last backward pass never came to its end
            self._backward = False
            self.window.give_gradients(failed=True)
        missing = number not in self.window.resident
        if missing or (number == 0 and self.window.stale):
            self.window.stats.out_of_turn += missing
            self.window.move(self.slide.from_here(number))

    def _change(self, move: WindowMove | None) -> None:
        if move is not None:
            self.window.move(move.wanted, leaving=move.leaving)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Let autograd keep places of weights instead of what lies there now.

        What is no weight goes the way it would go: to the hooks around, such as those of
        activation checkpointing, if there are any.
        """
        import torch

        if not torch.is_grad_enabled():
            yield
            return
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        window = self.window

        def pack(tensor: Tensor) -> Any:
            place = window.place(tensor)
            if place is not None:
                return place
            return ResidentTensor(tensor) if outer is None else _Outer(outer[0](tensor))

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, _Outer):
                assert outer is not None
                tensor: Tensor = outer[1](kept.kept)
                return tensor
            if isinstance(kept, ResidentTensor):
                return kept.get()
            self._fetch(kept.block)
            return window.at(kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _watch(self, number: int, result: Any) -> bool:
        """Have the backward pass report when it comes to this block; whether there will be one."""
        import torch
        from torch.utils._pytree import tree_leaves

        if not torch.is_grad_enabled():
            return False
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(functools.partial(self._at_backward, number))
                return True
        return False

    def _at_backward(self, number: int, gradients: Any) -> None:
        import torch

        if not self._backward:
            self._backward = True
            self.window.set_gradients_aside()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        move = self.slide.before_backward(number)
        if move is not None:
            self.window.take_gradients(range(number + 1, self.slide.n))
            self.window.move(move.wanted, leaving=move.leaving)
        else:
            self._fetch(number)

    def _fetch(self, number: int) -> None:
        """In the backward pass: the window is where this block is."""
        if number not in self.window.resident:
            self.window.stats.out_of_turn += 1
            self.window.move(self.slide.from_here(number, backward=True))

    def _backward_over(self) -> None:
        self._backward = False
        self.window.give_gradients()


@dataclass(frozen=True, slots=True)
class _Outer:
    """What the hooks around made of a tensor."""

    kept: Any


@contextlib.contextmanager
def _no_cast_is_kept() -> Iterator[None]:
    """Autocast keeps no copies of weights that are about to go."""
    import torch

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _rounded(nbytes: int, alignment: int) -> int:
    return -(-max(1, nbytes) // alignment) * alignment
