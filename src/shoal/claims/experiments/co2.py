"""[13] CO2: do workers lose no time on a slow network, and little of what they learn?

Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
Overlap, ICLR 2024.

- Two processes in network namespaces, 50 Mbit/s between them: rounds of CO2 beside steps that sum
  their gradients and beside rounds of local SGD, in turn, each begun with its link as busy as it
  is in a long run; and beside the same two processes on a link without shaping.
- A model of 1.3 M parameters trained on bytes by two workers, for three seeds and as many tokens
  each: held-out loss beside that of summed gradients; of one seed, beside local SGD and without
  penalty and clipping. AdamW's first moment decays by 0.5 for all: what is applied a round late
  overshoots where it is also remembered for ten steps. Changes travel in bf16, as local SGD's do.
- Workers that are threads beside their simulation one after the other: bits that differ.

The A/A run has summed gradients in the place of CO2 where these are the baseline, and local SGD
elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import Tensor

__all__ = ["CO2Claim"]

_RANKS = "shoal.claims.experiments.co2_ranks"
# What the losses depend on.
_CODE = (
    *("core", "ir", "kernel", "memory", "model", "parallel", "train"),
    *("claims/lab", "claims/experiments/co2_ranks.py", "claims/experiments/arch_training.py"),
)
_TIMED = ("over_summed", "over_local_sgd", "not_exposed", "kept")
# What is timed in a row.
_SUMMED_STEPS, _ROUNDS = 3, 3
_VISITS = 2


# By kind of steps, seconds of one and the share of it in which a rank waited, turn by turn.
_Times = dict[str, tuple[tuple[float, ...], tuple[float, ...]]]


@part
class CO2Claim(BaseClaim):
    """Two workers over 50 Mbit/s beside summed gradients and beside local SGD.

    Args:
        bandwidth: byte/s of the emulated link.
        packet: largest packet on it, bytes: a network card hands the cores as much at once, which
            here compute while they take packets.
        tau: steps of a round.
        turns: how often each is timed.
        steps: of the runs that learn.
        seeds: how many of these there are of CO2 and of summed gradients; of others one.
    """

    bandwidth: Annotated[float, Ge(1)] = 6.25e6
    packet: Annotated[int, Ge(1)] = 16000
    tau: Annotated[int, Ge(1)] = 6
    turns: Annotated[int, Ge(1)] = 18
    steps: Annotated[int, Ge(1)] = 2400
    seeds: Annotated[int, Ge(1)] = 3

    rows: ClassVar[tuple[int, ...]] = (13,)
    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        context.progress("workers beside their simulation", 0.0)
        unlike = tuple(float(n) for n in _unlike(local=as_baseline))
        metrics = {"unlike_simulation": PairedSamples(method=unlike)}
        if quick:
            return ClaimSamples(metrics=metrics)
        details: dict[str, Any] = {}
        context.progress("training of as many tokens", 0.05)
        runs, given = self._learning(context.seed)
        learned = context.keep("losses", lambda: _losses(runs, given), given=given, code=_CODE)
        losses, details["learned"] = learned.value, learned.details()
        summed = losses["every_step"]
        ours = losses["every_step" if as_baseline else "co2"]
        metrics["loss_gap"] = PairedSamples(
            method=tuple(a - b for a, b in zip(ours, summed, strict=True))
        )
        details["heldout_loss"] = losses
        # Rounds as long whose averages are not late lose this much.
        bounds = {"loss_gap": losses["local_sgd"][0] - summed[0]}
        skipped = {}
        why = unavailable()
        if why is not None:
            skipped = dict.fromkeys(_TIMED, why)
            return ClaimSamples(metrics=metrics, skipped=skipped, details=details, bounds=bounds)
        shaped = {"every_step": "every_step", "local_sgd": "local_sgd", "co2": "co2"}
        unshaped = dict(shaped)
        over_summed, over_local, kept = "co2", "co2", "co2"
        if as_baseline:
            over_summed, over_local, kept = (
                "instead of summed",
                "instead of local",
                "instead of co2",
            )
            shaped = {**shaped, over_summed: "every_step", over_local: "local_sgd"}
            unshaped = {"co2": "co2", kept: "co2"}
        timed: _Times = {}
        free: _Times = {}
        # On one link and on the other, more than once: what drifts is in both.
        for visit in range(_VISITS):
            context.progress("rounds over a slow link", 0.5 + 0.5 * visit / _VISITS)
            turns = -(-self.turns // _VISITS)
            _extend(timed, self._timed(self.bandwidth, turns, shaped))
            context.progress("the same on a link that nobody shapes", 0.7 + 0.5 * visit / _VISITS)
            _extend(free, self._timed(None, turns, unshaped))
        seconds = {name: both[0] for name, both in timed.items()}
        metrics |= {
            "over_summed": PairedSamples(
                method=seconds[over_summed], baseline=seconds["every_step"]
            ),
            "over_local_sgd": PairedSamples(
                method=seconds[over_local], baseline=seconds["local_sgd"]
            ),
            "not_exposed": PairedSamples(method=tuple(1 - share for share in timed[over_local][1])),
            "kept": PairedSamples(
                method=free[kept][0] if as_baseline else seconds["co2"], baseline=free["co2"][0]
            ),
        }
        details["step_s"] = {name: list(both[0]) for name, both in timed.items()}
        details["exposed"] = {name: list(both[1]) for name, both in timed.items()}
        details["unshaped_step_s"] = {name: list(both[0]) for name, both in free.items()}
        return ClaimSamples(
            metrics=metrics, details=details, profile=_profile(timed), bounds=bounds
        )

    def _job(self, sync: Any, seed: int = 0) -> dict[str, Any]:
        from shoal.ir import TrainJob

        job = TrainJob.model_validate(
            {
                "model": "shoal-1m",
                "seq_len": 128,
                "global_batch": 8,
                "precision": "fp32",
                "parallel": {"dp": 2},
                "optimizer": {"name": "adamw", "lr": 4e-3, "beta1": 0.5},
                "sync": sync,
                "seed": seed,
            }
        )
        return job.model_dump(mode="json")

    def _syncs(self) -> dict[str, Any]:
        rounds = {"tau": self.tau, "dtype": "bf16"}
        co2: dict[str, Any] = {"name": "co2", **rounds}
        return {
            "every_step": "every_step",
            "local_sgd": {"name": "local_sgd", **rounds},
            "co2": co2,
            "co2 without penalty": {**co2, "penalty": "none"},
            "co2 without clip": {**co2, "clip": None},
        }

    def _learning(self, seed: int) -> tuple[list[str], dict[str, Any]]:
        """Kinds of the runs that learn, and what their ranks are given."""
        syncs = self._syncs()
        # What is shown beside and not judged has one seed.
        judged = ("every_step", "co2")
        runs = [
            (name, seed + number)
            for name in syncs
            for number in range(self.seeds if name in judged else 1)
        ]
        return [name for name, _ in runs], {
            "jobs": [self._job(syncs[name], own) for name, own in runs],
            "config": _config(),
            "steps": self.steps,
        }

    def _timed(self, bandwidth: float | None, turns: int, names: Mapping[str, str]) -> _Times:
        """Every name's kind of steps, on a link of so many byte/s; of the slower rank."""
        from shoal.parallel.comm.processes import run_processes

        syncs = self._syncs()
        given = {
            "jobs": [self._job(syncs[kind]) for kind in names.values()],
            "config": _config(),
            "steps": [
                _SUMMED_STEPS if kind == "every_step" else _ROUNDS * self.tau
                for kind in names.values()
            ],
            "turns": turns,
        }
        options: dict[str, Any] = {"ranks_per_node": 1, "timeout_s": 900.0}
        if bandwidth is None:
            ranks = run_processes(f"{_RANKS}:time_rounds", 2, given, **options)
        else:
            with emulate(2, bandwidth=bandwidth, packet=self.packet) as network:
                ranks = run_processes(
                    f"{_RANKS}:time_rounds", 2, given, start=network.start, **options
                )
        result = {}
        for name, pairs in zip(names, zip(*ranks, strict=True), strict=True):
            turned = list(zip(*pairs, strict=True))
            result[name] = (
                tuple(max(rank[0] for rank in both) for both in turned),
                tuple(max(rank[1] for rank in both) for both in turned),
            )
        return result


def _losses(runs: list[str], given: dict[str, Any]) -> dict[str, JsonValue]:
    """Held-out loss by kind and seed, nats a byte."""
    from shoal.parallel.comm.processes import run_processes

    losses = run_processes(f"{_RANKS}:learn", 2, given, timeout_s=7200.0)[0]
    return {
        name: [loss for own, loss in zip(runs, losses, strict=True) if own == name]
        for name in dict.fromkeys(runs)
    }


def _extend(known: _Times, more: _Times) -> None:
    for name, (seconds, waited) in more.items():
        before = known.get(name, ((), ()))
        known[name] = (before[0] + seconds, before[1] + waited)


def _config() -> dict[str, Any]:
    from shoal.claims.experiments.arch_training import mini

    return mini(128, 6).model_dump(mode="json")


def _profile(timed: _Times) -> str:
    middle = {name: sorted(both[0])[len(both[0]) // 2] for name, both in timed.items()}
    return ", ".join(f"{name} {1e3 * seconds:.0f} ms a step" for name, seconds in middle.items())


def _unlike(*, local: bool) -> list[int]:
    """Elements in which workers that are threads differ from their simulation, by setting."""
    import torch

    from shoal.claims.lab.outer_reference import simulate
    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.ir import Parallel
    from shoal.ir.hooks import TrainStep
    from shoal.parallel.comm.ranks import ranks_of
    from shoal.parallel.outer.averaging import Averaging
    from shoal.parallel.outer.co2 import CO2
    from shoal.parallel.outer.local_sgd import LocalSGD

    source = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=source, dtype=torch.float64) for size in (37, 5, 128)]

    def inner(worker: int, step: int, parameters: list[Tensor]) -> None:
        own = torch.Generator().manual_seed(1000 * worker + step)
        for p in parameters:
            p.sub_(0.05 * (p + torch.randn(p.shape, generator=own, dtype=torch.float64)))

    results = []
    penalties: tuple[Literal["gap", "const", "none"], ...] = ("gap", "const", "none")
    for tau, workers, penalty in itertools.product((1, 3), (2, 3), penalties):
        wanted = CO2(tau=tau, penalty=penalty, clip=0.02)
        ours: Averaging = LocalSGD(tau=tau) if local else wanted
        result = simulate(wanted, start, inner, workers=workers, steps=10)[-1]

        def on(comm: Any, ours: Averaging = ours) -> list[Tensor]:
            mine = [x.clone() for x in start]
            owned = {str(number): x for number, x in enumerate(mine)}
            ranks = ranks_of(comm, Parallel(dp=comm.world), comm.world)
            rounds = ours.apply(torch.nn.Module(), owned, ranks)
            for step in range(10):
                inner(comm.rank, step, mine)
                rounds.after_update(TrainStep(step, 10))
            return mine

        for mine in run_ranks(workers, on):
            results.append(sum(int((a != b).sum()) for a, b in zip(mine, result, strict=True)))
    return results
