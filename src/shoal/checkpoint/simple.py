"""Saving and loading whatever a program trains, in two calls.

::

    from shoal import checkpoint

    state = {"model": model, "optimizer": optimizer, "extra": {"epoch": 3}}
    checkpoint.save("run", state, step=300)
    checkpoint.load("run", state)

Under ``torch.distributed`` all ranks make the same call. Each saves its part, and what several
hold is written once; any number of ranks in any layout loads it. Who saves often keeps a
:class:`Checkpoints` open, which plans once and not at every save.

Source: Wan et al., ByteCheckpoint, 2024, section 5 (the two calls).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shoal.checkpoint.loading import LoadReport, load_pieces
from shoal.checkpoint.peers import CommPeers, SinglePeer
from shoal.checkpoint.states import PrefixedTensors, StateSource, source_of, unwrapped
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ShoalError, require
from shoal.core.parts import Choice, table

if TYPE_CHECKING:
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.pieces import Piece
    from shoal.checkpoint.protocols import Saver, SaveTicket
    from shoal.ir.comm import Comm

State = Mapping[str, Any]
Mode = Choice | str | Mapping[str, Any]

# Where plain data of each source lies in the meta of a checkpoint.
_PLAIN = "plain"

_closing: dict[str, threading.Thread] = {}
"""Saves that go on behind a call of :func:`save`, by place."""


class Checkpoints:
    """The checkpoints of a program, open for saving and loading. All ranks make the same calls.

    Args:
        path: directory, or an address such as ``s3://bucket/run``.
        mode: how saving and the program share the time: ``blocking``, ``snapshot`` or ``lazy``,
            with options as ``{"name": "lazy", "host_buffer": "2GB"}``. Under ``lazy`` an optimizer
            that is saved waits by itself before it steps; other changes call
            :meth:`before_update`.
        keep: how many of the newest are kept; all if not given.
        comm: the ranks; those of ``torch.distributed`` where it is initialised, if not given.
        device: where tensors lie, ``cpu`` or ``cuda``; detected if not given.

    Raises:
        CheckpointError: another program is saving there, or the place refuses.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        mode: Mode = "blocking",
        keep: int | None = None,
        comm: Comm | None = None,
        device: str | None = None,
    ) -> None:
        require(keep is None or keep >= 1, "keep", keep, expected="a number of at least 1, or None")
        self.comm = comm if comm is not None else _ranks()
        self.peers: Peers = SinglePeer() if self.comm is None else CommPeers(self.comm)
        self.store = Store(path, keep=keep or sys.maxsize)
        self._mode = table("save_mode").build(mode)
        self._device = device or _device()
        self._saver: Saver | None = None
        self._hooked: dict[int, Any] = {}

    def save(
        self, step: int, state: State | StateSource, *, meta: Mapping[str, Any] | None = None
    ) -> SaveTicket:
        """Save a state; in modes other than ``blocking`` it goes on behind the program.

        Args:
            step: a number for it, at least 0; one that was saved before is replaced.
            state: name -> module, optimizer, data loader, or tree of tensors and plain data, see
                :func:`~shoal.checkpoint.states.source_of`; or one source of its own.
            meta: plain data to keep beside, of rank 0.

        Raises:
            CheckpointError: it cannot be stored. The ticket reports what goes on behind.
        """
        sources = _sources(state, self.peers)
        plain = {key: source.plain() for key, source in sources.items()}
        given: dict[str, Any] = {}
        for prefix, source in sources.items():
            for name, pieces in source.shards().items():
                given[_joined(prefix, name)] = pieces
        if self._saver is None:
            self._saver = self._mode.build(self.store, self.peers, device=self._device)
        self._hook(state)
        kept = {key: value for key, value in plain.items() if value is not None}
        ticket: SaveTicket = self._saver.save(step, given, {**(meta or {}), _PLAIN: kept})
        if ticket.done() and ticket.error is not None:
            raise ticket.error
        return ticket

    def load(
        self,
        state: State | StateSource,
        *,
        step: int | None = None,
        verify: bool = True,
        cast: bool = False,
    ) -> LoadReport:
        """Load a saved state into ``state``, saved with any parallelism.

        Args:
            state: as for :meth:`save`; it may be less than what was saved. After an error
                its contents are undefined.
            step: which one; the newest if not given.
            verify: compare what is read with its checksums.
            cast: tensors may have another dtype than the stored ones.

        Raises:
            CheckpointError: nothing was saved, or something is missing or of another shape.
            CorruptError: it is damaged; names the tensor, and the step to use instead.
        """
        # Of ranks that look at different moments the first says which is the newest.
        newest = max(self.store.steps(), default=-1) if step is None else step
        chosen = int(self.peers.gather(str(newest).encode())[0])
        if chosen < 0:
            raise CheckpointError(f"{self.store.where}: no checkpoint was saved here")
        wanted: dict[str, list[Piece]] = {}
        failure: ShoalError | None = None
        try:
            saved = self.store.open(chosen, verify=False)
            sources = _sources(state, self.peers)
            for prefix, source in sources.items():
                under = PrefixedTensors(saved, f"{prefix}." if prefix else "")
                for name, pieces in source.wanted(under).items():
                    wanted.setdefault(_joined(prefix, name), []).extend(pieces)
        except ShoalError as cause:
            failure = cause  # the others must not wait for this rank
        for rank, result in enumerate(self.peers.gather(str(failure or "").encode())):
            if failure is not None:
                raise failure
            if result:
                raise CheckpointError(f"rank {rank}: {result.decode()}")
        report = load_pieces(saved, wanted, self.comm, verify=verify, cast=cast)
        plain = saved.meta.get(_PLAIN) or {}
        for prefix, source in sources.items():
            source.loaded(plain.get(prefix))
        return report

    def steps(self) -> tuple[int, ...]:
        """Steps that were saved here, oldest first; one without an index is none."""
        return self.store.steps()

    def prepare(self, state: State) -> None:
        """One step before :meth:`save`: loaders that read ahead begin to note their state.

        A save without it is the same, and waits for the batch that is being read.
        """
        for value in state.values():
            fetch = getattr(value, "fetch_state", None)
            if fetch is not None:
                fetch()

    def before_update(self) -> None:
        """Return when what is being saved may change."""
        saver = self._saver  # a thread that closes it may be under way
        if saver is not None:
            saver.before_update()

    def close(self) -> None:
        """Return when everything under way is saved, and let go of the place."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        # Only now: an optimizer that steps in the meantime still waits.
        for handle in self._hooked.values():
            handle.remove()
        self._hooked = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hook(self, state: State | StateSource) -> None:
        """Let optimizers wait before they step."""
        import torch

        for value in state.values() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.optim.Optimizer) and id(value) not in self._hooked:
                handle = value.register_step_pre_hook(lambda *_: self.before_update())
                self._hooked[id(value)] = handle


def save(
    path: Path | str,
    state: State | StateSource,
    *,
    step: int = 0,
    mode: Mode = "blocking",
    keep: int | None = None,
    comm: Comm | None = None,
    meta: Mapping[str, Any] | None = None,
) -> SaveTicket:
    """Save a state once; see :meth:`Checkpoints.save`.

    Args:
        path: directory, or an address such as ``s3://bucket/run``; holds one or many steps.
        state: name -> module, optimizer, data loader, tree of tensors and plain data.
        step: a number for it.
        mode: ``blocking`` returns when it is durable; ``snapshot`` when it is copied; ``lazy`` at
            once. A later call for the same place waits for the earlier one.
        keep: how many of the newest are kept; all if not given.
        comm: the ranks; those of ``torch.distributed``, if not given.
        meta: plain data to keep beside.

    Returns:
        What went on and how long it took; ``wait()`` returns when it is durable.

    Raises:
        CheckpointError: it cannot be saved.
    """
    place = str(path)
    earlier = _closing.pop(place, None)
    if earlier is not None:
        earlier.join()
    checkpoints = Checkpoints(path, mode=mode, keep=keep, comm=comm)
    try:
        ticket = checkpoints.save(step, state, meta=meta)
    except BaseException:
        checkpoints.close()
        raise
    if ticket.done():
        checkpoints.close()
    else:
        closing = threading.Thread(target=checkpoints.close, name="checkpoint-close")
        if not _closing:
            _finish_before_exit()
        _closing[place] = closing
        closing.start()
    return ticket


def load(
    path: Path | str,
    state: State | StateSource,
    *,
    step: int | None = None,
    comm: Comm | None = None,
    verify: bool = True,
    cast: bool = False,
) -> LoadReport:
    """Fill a state with a saved one; see :meth:`Checkpoints.load`.

    Args:
        path: directory or address.
        state: name -> what to fill.
        step: which one; the newest if not given.
        comm: the ranks; those of ``torch.distributed``, if not given.
        verify: compare what is read with its checksums.
        cast: tensors may have another dtype than the stored ones.

    Returns:
        What it has cost this rank: bytes wanted, read and passed on, and seconds.

    Raises:
        CheckpointError: nothing was saved, or something is missing or of another shape.
        CorruptError: it is damaged.
    """
    earlier = _closing.get(str(path))
    if earlier is not None:
        earlier.join()
    with contextlib.closing(Checkpoints(path, comm=comm)) as checkpoints:
        return checkpoints.load(state, step=step, verify=verify, cast=cast)


@functools.cache
def _finish_before_exit() -> None:
    """Let a program that ends wait for what it began to save.

    Executors stop taking work when the interpreter begins to end, which is before atexit; what is
    registered here comes before that.
    """

    def finish() -> None:
        for closing in list(_closing.values()):
            closing.join()

    threading._register_atexit(finish)  # type: ignore[attr-defined]


def _sources(state: State | StateSource, peers: Peers) -> dict[str, StateSource]:
    """Prefix of names -> source."""
    import torch

    if not isinstance(state, Mapping):
        require(
            isinstance(state, StateSource),
            "state",
            type(state).__name__,
            expected="a dict, such as {'model': model, 'optimizer': optimizer}",
            error=CheckpointError,
        )
        return {"": state}
    modules = {k: unwrapped(v) for k, v in state.items() if isinstance(v, torch.nn.Module)}
    names: dict[int, str] = {}
    for key, module in modules.items():
        prefix = f"{key}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), prefix + name)
    for key in state:
        require(
            isinstance(key, str) and bool(key) and "." not in key,
            "state",
            key,
            expected="names without dots, such as model and optimizer",
            error=CheckpointError,
        )
    return {key: source_of(key, value, names, peers) for key, value in state.items()}


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _ranks() -> Comm | None:
    """The ranks of torch.distributed, if there are several."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    from shoal.core.meter import Meter
    from shoal.parallel.comm.collectives import TorchComm

    return TorchComm(
        Meter(),
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device="cuda" if dist.get_backend() == "nccl" else "cpu",
        shared_memory=False,
    )


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
