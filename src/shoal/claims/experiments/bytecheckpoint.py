"""[102] ByteCheckpoint: how long does a save hold ranks up, and who writes and reads what?

Four real processes hold the same 600 MB and save it in turns with mode ``snapshot`` and with
``torch.distributed.checkpoint.save``; both flush their files. ``stall_avoided`` is the share of the
time for which DCP holds ranks up that is not there, ``planning_avoided`` the share of a first
plan's time that the next one does without. The A/A run saves with DCP, writes replicas on the first
rank, and plans anew each time.

Source: Wan et al., ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model
Development, 2024.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.bytecheckpoint_load import measure_load
from shoal.claims.experiments.tiny import wide
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.parts import part

_RANKS = "shoal.claims.experiments.bytecheckpoint_ranks"
_WORLD = 4


@part
class ByteCheckpointClaim(BaseClaim, row=102, needs=("torch",)):
    """Stall, time, balance and planning of saves by four ranks.

    Args:
        samples: samples of each way to save.
        saves: saves of which a sample is the sum.
        width: width of the model; 1024 gives 600 MB of state.
    """

    samples: Annotated[int, Ge(1)] = 40
    saves: Annotated[int, Ge(1)] = 2
    width: Annotated[int, MultipleOf(64), Ge(64), Le(4096)] = 1024

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        self._balance(run)
        measure_load(run)
        if run.quick:
            return
        run.progress("saving in turns", 0.1)
        times = self._times(run)
        pairs = list(zip(times["ours"], times["theirs"], strict=True))
        plans = list(zip(times["fresh"], times["known"], strict=True))
        run.put("stall_avoided", (1 - one[0] / other[0] for one, other in pairs))
        run.put("whole_save", (one[1] for one, _ in pairs), (other[1] for _, other in pairs))
        run.put("planning_avoided", (1 - known / fresh for fresh, known in plans))

    def _balance(self, run: ClaimRun) -> None:
        """Planned for models of several shapes, whose tensors divide as badly as they like."""
        from shoal.claims.experiments.bytecheckpoint_ranks import shares, state

        ratios = []
        for width, layers in ((64, 1), (64, 3), (128, 2)):
            result = shares(state(wide(width, layers)), _WORLD, balanced=not run.as_baseline)
            ratios.append(max(result) / max(1, min(result)))
        run.put("balance", ratios)

    def _times(self, run: ClaimRun) -> dict[str, Any]:
        """Of every save the slowest rank's."""
        ranks = on_ranks(
            f"{_RANKS}:time_saves", _WORLD, timeout_s=500.0, config=wide(self.width, 3),
            root=str(run.work_dir / run.pick("saves", "baseline")),
            samples=run.pick(self.samples, min(self.samples, 3)), saves=run.pick(self.saves, 1),
            mode=run.pick("snapshot", "dcp"),
        )  # fmt: skip
        times: dict[str, Any] = {name: slowest(ranks, name) for name in ("fresh", "known")}
        for name in ("ours", "theirs"):
            times[name] = [
                list(map(max, zip(*sample, strict=True)))
                for sample in zip(*(rank[name] for rank in ranks), strict=True)
            ]
        return times
