"""[36] DataStates-LLM: what does a save at every step cost, if the copy is made during the next?

A process trains on one of two cores and saves 600 MB after every step to a disk held to 300 MB/s,
in turns with ``torch.save``, which blocks; mode ``snapshot``, which copies first and writes behind,
as ``async_save`` of torch.distributed.checkpoint does; and mode ``lazy``, which copies during the
next step. ``wrong_versions`` counts checkpoints that are not their step's state bit for bit. The
A/A run has ``torch.save`` in the place of ``lazy`` and updates without waiting.

Source: Maurya et al., DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models,
2024.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import wide
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks
from shoal.core.parts import part

_RANK = "shoal.claims.experiments.datastates_rank"
_BLOCKING, _TWO_PHASE, _LAZY = "torch.save", "snapshot", "lazy"
_DISK_BYTES_PER_S = 300e6


@part
class DataStatesClaim(BaseClaim, row=36, needs=("torch",), cores=2):
    """Twelve steps in each of three modes, and what was saved.

    Args:
        rounds: turns of each mode.
        steps: steps of a turn.
        width: width of the model; 1024 gives 600 MB of state.
        tokens: tokens of a step; enough that the disk keeps up.
    """

    rounds: Annotated[int, Ge(1)] = 3
    steps: Annotated[int, Ge(1)] = 4
    width: Annotated[int, MultipleOf(64), Ge(64), Le(4096)] = 1024
    tokens: Annotated[int, Ge(1)] = 1024

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.put("wrong_versions", self._versions(run))
        if run.quick:
            return
        run.progress("saving after every step, in turns", 0.1)
        times = self._times(run)
        lazy, blocking = times[run.pick(_LAZY, _BLOCKING)], times[_BLOCKING]
        for metric, other in (("blocking_avoided", _BLOCKING), ("two_phase_avoided", _TWO_PHASE)):
            pairs = zip(lazy["blocked"], times[other]["blocked"], strict=True)
            run.put(metric, (1 - mine / theirs for mine, theirs in pairs))
        run.put("end_to_end", lazy["step"], blocking["step"])
        held_up = list(zip(times[_TWO_PHASE]["blocked"], times["peer"], strict=False))
        run.put_peer("two_phase_avoided", *zip(*held_up, strict=True))

    def _times(self, run: ClaimRun) -> dict[str, Any]:
        times: dict[str, Any] = on_ranks(
            f"{_RANK}:time_modes", 1, timeout_s=500.0, config=wide(self.width, 3),
            tokens=self.tokens, root=str(run.work_dir / run.pick("saves", "baseline")),
            rounds=run.pick(self.rounds, 1), steps=run.pick(self.steps, min(self.steps, 2)),
            bytes_per_s=_DISK_BYTES_PER_S,
            modes=run.pick([_BLOCKING, _TWO_PHASE, _LAZY], [_BLOCKING, _TWO_PHASE]),
        )[0]  # fmt: skip
        return times

    def _versions(self, run: ClaimRun) -> int:
        from shoal.claims.experiments.datastates_rank import wrong_versions

        return wrong_versions(
            config=wide(128, 2),
            root=run.work_dir / f"versions-{run.as_baseline}",
            steps=8,
            bytes_per_s=30e6,
            guarded=not run.as_baseline,
        )
