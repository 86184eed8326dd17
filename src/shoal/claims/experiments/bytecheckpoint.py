"""[102] ByteCheckpoint: how long does a save hold ranks up, and who writes and reads what?

Four real processes hold the same 600 MB of weights and moments, as data-parallel ranks do. In
turns they save with mode ``snapshot``, whose ranks write disjoint shares behind training, and with
``torch.distributed.checkpoint.save``; both flush their files. What is saved is removed again.

- ``stall_avoided``: of the time for which DCP holds the ranks up, the share that is not there; 10
  times shorter is 0.9.
- ``whole_save``: until the checkpoint is durable, on all ranks.
- ``balance``: bytes of the rank that writes most, over those of the one that writes least.
- ``planning_avoided``: of the time of a first plan, the share that the next one does without; a
  fifth of the time is 0.8.

The baseline saves with DCP in place of the mode, writes replicas on the first rank, and plans every
time anew.

Source: Wan et al., ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model
Development, 2024.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.bytecheckpoint_load import measure_load
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part

__all__ = ["ByteCheckpointClaim"]

_RANKS = "shoal.claims.experiments.bytecheckpoint_ranks"
_WORLD = 4


@part
class ByteCheckpointClaim(BaseClaim):
    """Stall, time, balance and planning of saves by four ranks.

    Args:
        samples: of each way to save.
        saves: of which a sample is the sum.
        width: of the model; 1024 gives 600 MB of state.
    """

    samples: Annotated[int, Ge(1)] = 40
    saves: Annotated[int, Ge(1)] = 2
    width: Annotated[int, MultipleOf(64), Ge(64), Le(4096)] = 1024

    rows: ClassVar[tuple[int, ...]] = (102,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        metrics = {
            "balance": self._balance(as_baseline),
            **measure_load(context, quick=quick, as_baseline=as_baseline),
        }
        if quick:
            return ClaimSamples(metrics=metrics)
        context.progress("saving in turns", 0.1)
        times = self._times(context, as_baseline)
        pairs = list(zip(times["ours"], times["theirs"], strict=True))
        plans = list(zip(times["fresh"], times["known"], strict=True))
        metrics |= {
            "stall_avoided": PairedSamples(
                method=tuple(1 - one[0] / other[0] for one, other in pairs)
            ),
            "whole_save": PairedSamples(
                method=tuple(ours[1] for ours, _ in pairs),
                baseline=tuple(theirs[1] for _, theirs in pairs),
            ),
            "planning_avoided": PairedSamples(
                method=tuple(1 - known / fresh for fresh, known in plans)
            ),
        }
        details: dict[str, JsonValue] = {
            "seconds": {name: times[name] for name in ("ours", "theirs", "fresh", "known")},
            "bytes_of_ranks": times["bytes"],
        }
        return ClaimSamples(metrics=metrics, details=details)

    def _balance(self, as_baseline: bool) -> PairedSamples:
        """Planned for models of several shapes, whose tensors divide as badly as they like."""
        from shoal.claims.experiments.bytecheckpoint_ranks import shares, state

        ratios = []
        for width, layers in ((64, 1), (64, 3), (128, 2)):
            result = shares(state(_config(width, layers)), _WORLD, balanced=not as_baseline)
            ratios.append(max(result) / max(1, min(result)))
        return PairedSamples(method=tuple(ratios))

    def _times(self, context: ExperimentContext, as_baseline: bool) -> dict[str, Any]:
        """Of every save the slowest rank's; bytes of every rank."""
        from shoal.parallel.comm.processes import run_processes

        root = context.work_dir / ("baseline" if as_baseline else "saves")
        given = {
            "config": _config(self.width, 3),
            "root": str(root),
            "samples": min(self.samples, 3) if as_baseline else self.samples,
            "saves": 1 if as_baseline else self.saves,
            "mode": "dcp" if as_baseline else "snapshot",
        }
        ranks = run_processes(f"{_RANKS}:time_saves", _WORLD, given, timeout_s=500.0)
        times: dict[str, Any] = {"bytes": [rank["bytes"] for rank in ranks]}
        for name in ("ours", "theirs"):
            times[name] = [
                [max(seconds) for seconds in zip(*sample, strict=True)]
                for sample in zip(*(rank[name] for rank in ranks), strict=True)
            ]
        for name in ("fresh", "known"):
            times[name] = [max(all_) for all_ in zip(*(rank[name] for rank in ranks), strict=True)]
        return times


def _config(width: int, layers: int) -> dict[str, Any]:
    """A model that is wide for its depth."""
    return {
        "family": "llama",
        "vocab_size": 6 * width,
        "hidden": width,
        "num_layers": layers,
        "num_heads": width // 64,
        "num_kv_heads": width // 64,
        "head_dim": 64,
        "ffn_hidden": width * 8 // 3,
        "max_position": 128,
    }
