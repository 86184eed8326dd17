"""Parameters come to the device when a pass needs them, and leave it again.

A parameter of the model is empty until it is used: by the forward pass of its module, by code that
looks at it inside of a pass (a tied matrix, a method that is not ``forward``), or by a backward
pass that autograd saved it for. It stays until the forward pass of the module is over, or until
its gradient has come. What autograd saves of it is its name, not its memory.

Once a pass has shown the order, parameters are fetched ahead of their use: while one is gathered
from the ranks, the next is copied to the device and those after it are read from disk into a ring
of staging buffers, by threads of their own. One that is used again that soon stays. What is there
early has room of its own: what the first pass left free of the budget.

Collectives are called by the thread that computes, and every decision about them is a function of
counts and order alone: all ranks take the same, and their collectives meet. A rank that runs short
of memory by itself lets go of what it has fetched ahead, and fetches it again when the ranks gather
it; what is gathered already stays, because the others would not gather it once more.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, sections 6.2 (overlap) and 7.1 (hooks).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.memory.activations.waiting import Waiting
from shoal.memory.streaming.gradients import GradientStream
from shoal.memory.streaming.trace import PassTrace
from shoal.memory.tiers.mover import copied
from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
from shoal.memory.tiers.places import chunks

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.memory.activations.swapping import ActivationSwapping
    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.places import Place, StagingRing, Tiers

# Views and transpositions: a tensor that these make of a cast parameter has all of its elements.
_REORDERED = ("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0")


class _Lent(NamedTuple):
    """A view of a parameter that autograd will ask for again, perhaps in another dtype."""

    home: OffloadedParameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Watched(dict[str, Any]):
    """The parameters of a module; one that is taken is filled."""

    def __init__(self, found: dict[str, Any], touched: Callable[[Tensor], None]) -> None:
        super().__init__(found)
        self._touched = touched

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is not None:
            self._touched(value)
        return value


class ParameterStream(GradientStream):
    """Brings the parameters of a model to the device and their gradients away from it.

    Args:
        model: its parameters are emptied.
        homes: where they live.
        tiers: places and ways.
        comm: the ranks that share the parameters; None for one rank alone.
        incoming: staging buffers of parameters.
        outgoing: staging buffers of gradients.
        scratch: one more, for what gradients are added to.
        prefetch_numel: elements fetched ahead of their use; 0 for none.
        act: where other tensors that autograd saves wait: device or host.
    """

    def __init__(
        self,
        model: nn.Module,
        homes: Sequence[OffloadedParameter],
        tiers: Tiers,
        comm: Comm | None,
        *,
        incoming: StagingRing,
        outgoing: StagingRing,
        scratch: StagingRing,
        prefetch_numel: int,
        act: Place = "device",
    ) -> None:
        super().__init__(tiers, comm, outgoing, scratch)
        self.homes, self._incoming = homes, incoming
        self._prefetch_numel = prefetch_numel
        self._waiting: Waiting | ActivationSwapping | None
        self._waiting = Waiting(tiers, self._spare_for_saved) if act == "host" else None
        self.waited_s = 0.0
        """Seconds for which passes waited for parameters."""
        self._home = {home.parameter: home for home in homes}
        self._by_storage: dict[int, OffloadedParameter] = {}
        self._traces: dict[str, PassTrace[OffloadedParameter]] = {}
        self._trace: PassTrace[OffloadedParameter] | None = None
        self._frames: list[list[OffloadedParameter]] = []
        self._early: dict[OffloadedParameter, int] = {}
        self._passing: OffloadedParameter | None = None
        owners: dict[OffloadedParameter, int] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter in self._home:
                    owners[self._home[parameter]] = owners.get(self._home[parameter], 0) + 1
        # The gradient of what several modules have comes long after the first of them is through.
        self._tied = {home for home, count in owners.items() if count > 1}
        self._slack = 0
        tiers.scope.make_room = self._make_room
        for home in homes:
            if home.gradient is not None:
                home.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    functools.partial(self._received, home)
                )
        for module in model.modules():
            mine = [self._home[p] for p in module._parameters.values() if p in self._home]
            if mine:
                module.__dict__["_parameters"] = _Watched(module._parameters, self._touched)
            module.register_forward_pre_hook(functools.partial(self._enter, mine), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    @contextlib.contextmanager
    def passes(self, name: str, *inputs: Tensor | None) -> Iterator[None]:
        """Around all passes of one kind: those of a step, or those that score."""
        scope = self.tiers.scope
        for tensor in inputs:
            if tensor is not None:
                scope.adopt(tensor)
        trace = self._traces.setdefault(name, PassTrace(name))
        recorded = trace.known
        trace.begin()
        self._trace = trace
        if self._waiting is not None:
            self._waiting.begin()
        try:
            with scope, saved_tensors_hooks(self._pack, self._unpack):
                self._ahead()
                yield
            self.settle()
            trace.end()
            if not recorded:
                self._slack = self.tiers.device.capacity - self._need()
        except BaseException:
            trace.forget()
            raise
        finally:
            self._trace = None
            self._frames.clear()
            self.drop_all()

    def _need(self) -> int:
        """Bytes of the device that the passes take without prefetching, on any of the ranks."""
        need = self.tiers.peaks()["device"]
        if self.comm is not None:
            most = torch.tensor([need], dtype=torch.int64, device=self.tiers.device.device)
            self.comm.all_reduce(most, tag="count", op="max").wait()
            need = int(most)
        return need

    def drop_all(self) -> None:
        """Leave nothing on the device."""
        for home in self.homes:
            home.uses, home.kept = 0, False
            self._drop(home)
        self._passing = None

    # What modules do.

    def _enter(self, homes: list[OffloadedParameter], _module: nn.Module, _args: Any) -> None:
        if self._trace is None:
            return
        frame: list[OffloadedParameter] = []
        self._frames.append(frame)
        for home in homes:
            self._use(home, frame)

    def _leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        if self._frames:
            for home in self._frames.pop():
                home.uses -= 1
                if not home.uses and not home.kept:
                    self._release(home)

    def _touched(self, parameter: Tensor) -> None:
        home = self._home.get(parameter)  # type: ignore[call-overload]
        if home is None or self._trace is None or home.uses or home.kept:
            return
        if self._frames:
            self._use(home, self._frames[-1])
        else:  # its end is not known: until its gradient comes, or room is needed
            self._bring(home)
            home.kept = True

    def _use(self, home: OffloadedParameter, frame: list[OffloadedParameter]) -> None:
        if not home.uses and not home.kept:
            self._bring(home)
        home.uses += 1
        frame.append(home)

    # What autograd does.

    def _pack(self, tensor: Tensor) -> Any:
        home = self._by_storage.get(tensor.untyped_storage()._cdata)
        if home is None:
            home = self._cast_of(tensor)
        if home is None:
            return tensor if self._waiting is None else self._waiting.pack(tensor)
        return _Lent(
            home,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def _cast_of(self, tensor: Tensor) -> OffloadedParameter | None:
        """The parameter of which this is a copy in another dtype."""
        made: Any = tensor.grad_fn
        while made is not None and made.name() in _REORDERED:
            made = made.next_functions[0][0]
        if made is None or made.name() != "ToCopyBackward0":
            return None
        leaf: Any = getattr(made.next_functions[0][0], "variable", None)
        home = self._home.get(leaf)
        whole = tensor.untyped_storage().nbytes()
        if home is None or whole != home.cut.whole * tensor.dtype.itemsize:
            return None
        return home

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not isinstance(packed, _Lent):
            assert self._waiting is not None
            return self._waiting.unpack(packed)
        home = packed.home
        if not home.uses and not home.kept:
            self._bring(home)
            home.kept = True
        if self._passing not in (None, home):
            self._pass()
        if home.gradient is None or home in self._tied:
            # No gradient shows when it is over: until another parameter is wanted.
            self._passing = home
        assert home.flat is not None
        return home.flat.to(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)

    def _pass(self) -> None:
        """The backward pass is through with what no gradient says it is through with."""
        home, self._passing = self._passing, None
        assert home is not None
        if not home.uses:
            home.kept = False
            self._drop(home)

    def _received(self, home: OffloadedParameter, parameter: Tensor) -> None:
        """A gradient has come: it leaves the device, and so does the parameter."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        home.kept = False
        if not home.uses:
            self._drop(home)
        self.leaves(home, gradient)

    # Bringing parameters.

    def _bring(self, home: OffloadedParameter) -> None:
        """Have a parameter on the device, and those that come after it on their way."""
        assert self._trace is not None
        self._trace.use(home)
        self._early.pop(home, None)
        if home.flat is None:
            self._start(home)
        self._ahead()
        self._arrive(home)
        if self.comm is not None:
            following = next(self._trace.upcoming(), None)
            if following in self._early:
                if following.flat is None:  # this rank had let it go
                    self._start(following)
                self._arrive(following)
        if home.gathering is not None:
            begin = time.perf_counter()
            home.gathering.wait()
            self.waited_s += time.perf_counter() - begin
            home.gathering = None
        assert home.flat is not None
        home.parameter.data = home.flat[: home.cut.whole].view(home.cut.shape)

    def _ahead(self) -> None:
        """Start to fetch what is used next, as far as there is room for it."""
        assert self._trace is not None
        left = self._prefetch_numel
        room = self._spare()
        if self.comm is None and self._waiting is not None:
            room -= self._waiting.early_bytes  # which is another on every rank
        for home in self._trace.upcoming() if left else ():
            left -= home.cut.whole
            if left < 0:
                return
            if home.flat is None and home not in self._early:
                nbytes = self._device_bytes(home)
                room -= nbytes
                if room < 0:
                    return
                self._start(home)
                self._early[home] = nbytes

    def _release(self, home: OffloadedParameter) -> None:
        """Drop a parameter whose pass is over, unless it would be fetched again right away."""
        assert self._trace is not None
        left = self._prefetch_numel
        for following in self._trace.upcoming() if left else ():
            left -= following.cut.whole
            if left < 0:
                break
            if following is home:
                nbytes = self._device_bytes(home)
                if self._spare() >= nbytes:
                    self._early[home] = nbytes
                    return
                break
        self._drop(home)

    def _spare(self) -> int:
        """Bytes of the device that are not needed, less those of parameters that came early."""
        assert self._trace is not None
        if not self._trace.known:
            return 0
        mine = self._slack
        if self.comm is not None and self._waiting is not None:
            mine //= 2  # the other half is for what is saved, which no two ranks fill alike
        return mine - sum(self._early.values())

    def _spare_for_saved(self) -> int:
        """The same for what autograd saved."""
        if self.comm is None:
            return self._spare()
        assert self._trace is not None
        return self._slack - self._slack // 2 if self._trace.known else 0

    def _device_bytes(self, home: OffloadedParameter) -> int:
        """What fetching a parameter takes of the device."""
        cut, size = home.cut, home.dtype.itemsize
        if self.comm is None or cut.owner is not None:
            return cut.whole * size
        return cut.padded * self.comm.world * size

    def _start(self, home: OffloadedParameter) -> None:
        """Fetch a parameter: disk to host, host to device, ranks to all."""
        cut, comm = home.cut, self.comm
        where = self.tiers.device.device
        parts = 1 if comm is None or cut.owner is not None else comm.world
        flat = torch.empty(cut.padded * parts, dtype=home.dtype, device=where)
        # The other ranks' parts come to either side of this one.
        mine = flat if parts == 1 or comm is None else flat.view(parts, -1)[comm.rank]
        home.flat, home.part = flat, None if comm is None else mine
        self._by_storage[flat.untyped_storage()._cdata] = home
        for first, count in chunks(cut.numel, self._incoming.nbytes // home.dtype.itemsize):
            home.ticket = self._copy_up(home, mine[first : first + count], first, count)

    def _arrive(self, home: OffloadedParameter) -> None:
        """Wait for this rank's part on the device, and ask the other ranks for theirs."""
        if home.ticket is not None:
            self.waited_s += home.ticket.wait()
            home.ticket = None
        if home.part is not None:
            assert self.comm is not None
            assert home.flat is not None
            owner = home.cut.owner
            if owner is None:
                home.gathering = self.comm.all_gather(home.flat, home.part, tag="parameters")
            else:
                home.gathering = self.comm.broadcast(home.flat, owner, tag="parameters")
            home.part = None

    def _copy_up(self, home: OffloadedParameter, target: Tensor, first: int, count: int) -> Ticket:
        row, ring, tiers = home.weight, self._incoming, self.tiers
        if not row.on_disk:
            return tiers.up.submit(
                lambda: copied(row.take(first, count, None), target), target.nbytes
            )
        tensors: list[Tensor] = []

        def read() -> None:
            slot = ring.get()
            try:
                tensors.extend((row.take(first, count, slot), slot))
            except BaseException:
                ring.put(slot)
                raise

        reading = tiers.read.submit(read, target.nbytes)

        def up() -> None:
            copied(tensors[0], target)
            ring.put(tensors[1])

        return tiers.up.submit(up, target.nbytes, after=reading)

    def _drop(self, home: OffloadedParameter) -> None:
        """Be through with a parameter; a remaining reference keeps it alive."""
        self._early.pop(home, None)
        self._let_go(home)

    def _let_go(self, home: OffloadedParameter) -> None:
        """Give a parameter's memory back."""
        if home.flat is not None:
            self._by_storage.pop(home.flat.untyped_storage()._cdata, None)
            home.parameter.data = home.empty
            if home.gathering is not None:
                home.gathering.wait()
            home.flat = home.part = home.ticket = home.gathering = None

    def _make_room(self, need: int) -> None:
        """Wait for what leaves the device; then do without what was fetched early."""
        scope = self.tiers.scope
        if self._waiting is not None:
            self._waiting.make_room()
        while self._leaving and scope.room < need:
            self._leaving.popleft().wait()
        alone = self.comm is None
        # What is gathered stays, and what is not is gathered when the other ranks do.
        going = [home for home in reversed(self._early) if alone or home.part is not None]
        if alone:
            going += [home for home in self.homes if home.kept and not home.uses]
        for home in going:
            if scope.room >= need:
                return
            if home.ticket is not None:
                home.ticket.wait()
            home.kept = False
            if alone:
                self._drop(home)
            else:
                self._let_go(home)
