"""[36] DataStates-LLM: what does a save at every step cost, if the copy is made during the next?

A process trains with one thread of two cores, because the copy needs a core of its own, and
saves 600 MB after every step to a disk that takes 300 MB/s: the real disk, with waits added. In
turns it saves with ``torch.save``, which blocks; with mode ``snapshot``, which copies everything
first and writes behind, as ``async_save`` of torch.distributed.checkpoint does; and with mode
``lazy``, which copies during forward and backward of the next step.

- ``blocking_avoided``: of the time for which ``torch.save`` holds a step up, the share that is not
  there in mode ``lazy``; 10 times shorter is 0.9.
- ``two_phase_avoided``: the same of mode ``snapshot``; half the time is 0.5.
- ``end_to_end``: time of a step with its save, over that of one with ``torch.save``.
- ``wrong_versions``: checkpoints that are not the state of their step bit for bit, on a disk far
  slower than the steps are.

The baseline saves with ``torch.save`` in place of mode ``lazy``; and it updates without waiting.

Source: Maurya et al., DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models,
2024.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import wide
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks
from shoal.core.parts import part

__all__ = ["DataStatesClaim"]

_RANK = "shoal.claims.experiments.datastates_rank"
_BLOCKING, _TWO_PHASE, _LAZY = "torch.save", "snapshot", "lazy"
_DISK_BYTES_PER_S = 300e6


@part
class DataStatesClaim(BaseClaim):
    """Twelve steps in each of three modes, and what was saved.

    Args:
        rounds: turns of each mode.
        steps: of a turn.
        width: of the model; 1024 gives 600 MB of state.
        tokens: of a step; enough that the disk keeps up.
    """

    rounds: Annotated[int, Ge(1)] = 3
    steps: Annotated[int, Ge(1)] = 4
    width: Annotated[int, MultipleOf(64), Ge(64), Le(4096)] = 1024
    tokens: Annotated[int, Ge(1)] = 1024

    rows: ClassVar[tuple[int, ...]] = (36,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)
    cores: ClassVar[int] = 2

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
        run.details["seconds"] = times

    def _times(self, run: ClaimRun) -> dict[str, Any]:
        times: dict[str, Any] = on_ranks(
            f"{_RANK}:time_modes",
            1,
            timeout_s=500.0,
            config=wide(self.width, 3),
            tokens=self.tokens,
            root=str(run.work_dir / run.pick("saves", "baseline")),
            rounds=run.pick(self.rounds, 1),
            steps=run.pick(self.steps, min(self.steps, 2)),
            bytes_per_s=_DISK_BYTES_PER_S,
            modes=run.pick([_BLOCKING, _TWO_PHASE, _LAZY], [_BLOCKING, _TWO_PHASE]),
            peer=True,
        )[0]
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
