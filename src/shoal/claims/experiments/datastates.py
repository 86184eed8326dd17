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

import importlib.util
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
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

    def refuses(self, context: ExperimentContext) -> str | None:
        """A process of torch, and a core for the copy."""
        from shoal.core.measure import num_cores

        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        if num_cores() < 2:
            return "one core: nobody is free to copy while it computes"
        return None

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        metrics = {"wrong_versions": self._versions(context, as_baseline)}
        if quick:
            return ClaimSamples(metrics=metrics)
        context.progress("saving after every step, in turns", 0.1)
        times = self._times(context, as_baseline)
        lazy = times[_BLOCKING if as_baseline else _LAZY]
        blocking, two_phase = times[_BLOCKING], times[_TWO_PHASE]

        def avoided(other: dict[str, list[float]]) -> PairedSamples:
            pairs = zip(lazy["blocked"], other["blocked"], strict=True)
            return PairedSamples(method=tuple(1 - mine / theirs for mine, theirs in pairs))

        metrics |= {
            "blocking_avoided": avoided(blocking),
            "two_phase_avoided": avoided(two_phase),
            "end_to_end": PairedSamples(
                method=tuple(lazy["step"]), baseline=tuple(blocking["step"])
            ),
        }
        held_up = list(zip(two_phase["blocked"], times["peer"], strict=False))
        peers = {
            "two_phase_avoided": PairedSamples(
                method=tuple(1 / ours for ours, _ in held_up),
                baseline=tuple(1 / theirs for _, theirs in held_up),
            )
        }
        details: dict[str, JsonValue] = {"seconds": times}
        return ClaimSamples(metrics=metrics, peers=peers, details=details)

    def _times(self, context: ExperimentContext, as_baseline: bool) -> dict[str, Any]:
        from shoal.parallel.comm.processes import run_processes

        modes = [_BLOCKING, _TWO_PHASE] + ([] if as_baseline else [_LAZY])
        given = {
            "config": _config(self.width, 3),
            "tokens": self.tokens,
            "root": str(context.work_dir / ("baseline" if as_baseline else "saves")),
            "rounds": 1 if as_baseline else self.rounds,
            "steps": min(self.steps, 2) if as_baseline else self.steps,
            "bytes_per_s": _DISK_BYTES_PER_S,
            "modes": modes,
            "peer": True,
        }
        times: dict[str, Any] = run_processes(
            f"{_RANK}:time_modes", 1, given, threads=1, timeout_s=500.0
        )[0]
        return times

    def _versions(self, context: ExperimentContext, as_baseline: bool) -> PairedSamples:
        from shoal.claims.experiments.datastates_rank import wrong_versions

        wrong = wrong_versions(
            config=_config(128, 2),
            root=context.work_dir / f"versions-{as_baseline}",
            steps=8,
            bytes_per_s=30e6,
            guarded=not as_baseline,
        )
        return PairedSamples(method=(float(wrong),))


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
