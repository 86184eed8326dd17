"""What the ranks of claim [102] ByteCheckpoint do: save, wait, plan."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.peers import CommPeers, SinglePeer
from shoal.checkpoint.plan import WritePlanner
from shoal.checkpoint.store import MODEL, OPTIMIZER, Store

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.protocols import Saver
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm


def state(config: ModelConfig) -> dict[str, Tensor]:
    """Weights of a fresh model and two moments of each, the same on every rank."""
    from shoal.train import zoo

    state: dict[str, Tensor] = {}
    for name, parameter in zoo.random(config).named_parameters():
        weight = parameter.detach()
        state[MODEL + name] = weight
        state[f"{OPTIMIZER}{name}.exp_avg"] = weight * 0.1
        state[f"{OPTIMIZER}{name}.exp_avg_sq"] = weight * weight
        state[f"{OPTIMIZER}{name}.step"] = torch.tensor(1.0)
    return state


class ShoalSaver:
    """A mode of ours."""

    def __init__(self, comm: Comm, place: Path, mode: str) -> None:
        self.place = place
        # All are kept, and removed by the measurement: reading back is no part of a save.
        store = Store(place, keep=1_000_000)
        self.saver: Saver = SAVE_MODES.build(mode).build(store, CommPeers(comm))

    def save(self, step: int, held: dict[str, Tensor]) -> tuple[float, float]:
        """Seconds for which the caller waits, and until the checkpoint is there."""
        begin = time.perf_counter()
        ticket = self.saver.save(step, held, {})
        self.saver.before_update()
        blocked = time.perf_counter() - begin
        ticket.wait()
        self.saver.finished()
        return blocked, time.perf_counter() - begin


class Dcp:
    """``torch.distributed.checkpoint.save``, which flushes its files as well."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def save(self, step: int, held: dict[str, Tensor]) -> tuple[float, float]:
        """See :class:`ShoalSaver`."""
        begin = time.perf_counter()
        save(dict(held), checkpoint_id=str(self.place / str(step)))
        seconds = time.perf_counter() - begin
        return seconds, seconds


def time_saves(
    comm: Comm, *, config: ModelConfig, root: str, samples: int, saves: int, mode: str
) -> dict[str, Any]:
    """Seconds of saves by a mode of ours and by DCP, in turns, and of plans.

    A sample is the sum of ``saves``. Returns this rank's seconds that ``ours`` and ``theirs`` held
    it up and took, and of planning a ``fresh`` and a ``known`` layout.
    """
    held = state(config)
    folder = Path(root)
    theirs = Dcp(folder / "theirs")
    ours = Dcp(folder / "ours") if mode == "dcp" else ShoalSaver(comm, folder / "ours", mode)
    times: dict[str, Any] = {"ours": [], "theirs": [], "fresh": [], "known": []}
    step = 0
    for sample in range(samples + 1):  # the first makes memory, threads and plans
        order = (("ours", ours), ("theirs", theirs))
        for name, method in order[:: -1 if sample % 2 else 1]:
            total = [0.0, 0.0]
            for _ in range(saves if sample else 1):
                step += 1
                comm.barrier()
                begin = time.perf_counter()
                blocked, _ = method.save(step, held)
                comm.barrier()
                total[0] += blocked
                total[1] += time.perf_counter() - begin
                if comm.rank == 0:
                    for path in method.place.iterdir():
                        shutil.rmtree(path)
                comm.barrier()
            if sample:
                times[name].append(total)
        if sample:
            fresh, known = _plans(CommPeers(comm), held, 3 * saves, cached=mode != "dcp")
            times["fresh"].append(fresh)
            times["known"].append(known)
    if isinstance(ours, ShoalSaver):
        ours.saver.close()
    return times


def _plans(
    peers: Peers, held: dict[str, Tensor], times: int, *, cached: bool
) -> tuple[float, float]:
    """Seconds of planning a layout that is new, and the same layout again."""
    fresh = known = 0.0
    for _ in range(times):
        planner = WritePlanner(peers)
        begin = time.perf_counter()
        planner.plan(held)
        between = time.perf_counter()
        (planner if cached else WritePlanner(peers)).plan(held)
        fresh += between - begin
        known += time.perf_counter() - between
    return fresh, known


def shares(held: dict[str, Tensor], world: int, *, balanced: bool) -> list[int]:
    """Bytes that each of some ranks with the same tensors writes: by plan, or all on the first."""
    if not balanced:
        return [sum(t.nbytes for t in held.values())] + [0] * (world - 1)

    class Same(SinglePeer):
        """The first of ranks that all say the same."""

        def __init__(self) -> None:
            self.world = world

        def gather(self, data: bytes) -> list[bytes]:
            return [data] * world

    return list(WritePlanner(Same()).plan(held).bytes_of_ranks)
