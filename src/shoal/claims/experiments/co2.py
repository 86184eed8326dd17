"""[13] CO2: do workers lose no time on a slow network, and little of what they learn?

Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation Overlap,
ICLR 2024.

Two processes with 50 Mbit/s between them: rounds of CO2, steps that sum gradients, rounds of local
SGD, in turn, each begun with its link as busy as in a long run. A model of 1.3 M parameters on
bytes by two workers, three seeds: held-out loss beside summed gradients. AdamW's first moment
decays by 0.5 for all: what is applied a round late overshoots where it is also remembered for ten
steps. Threads beside their simulation: bits that differ. The A/A run has the baselines in CO2's
place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.arch_training import mini
from shoal.claims.experiments.tiny import train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks
from shoal.core.parts import part
from shoal.ir import TrainJob
from shoal.machine.emulate import EmulatedNetwork, emulate, unavailable
from shoal.model.config import ModelConfig

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import Tensor

_RANKS = "shoal.claims.experiments.co2_ranks"
# What the losses depend on.
_CODE = (
    *("core", "ir", "kernel", "memory", "model", "parallel", "train"),
    *(f"claims/experiments/{name}.py" for name in ("co2_ranks", "arch_training", "tiny")),
    "claims/lab",
)
_TIMED = ("over_summed", "over_local_sgd", "not_exposed", "kept")
# What is timed in a row.
_SUMMED_STEPS, _ROUNDS = 3, 3
_VISITS = 2


# By kind of steps and turn, seconds of a step and the share of it in which a rank waited.
_Times = dict[str, list[tuple[float, ...]]]


@part
class CO2Claim(BaseClaim, row=13, needs=("torch",)):
    """Two workers over 50 Mbit/s beside summed gradients and beside local SGD.

    Args:
        bandwidth: byte/s of the emulated link.
        packet: largest packet on it, bytes: a network card hands the cores as much at once, which
            here compute while they take packets.
        tau: steps of a round.
        turns: how often each is timed.
        steps: steps of the runs that learn.
        seeds: how many of these there are of CO2 and of summed gradients; of others one.
    """

    bandwidth: Annotated[float, Ge(1)] = 6.25e6
    packet: Annotated[int, Ge(1)] = 16000
    tau: Annotated[int, Ge(1)] = 6
    turns: Annotated[int, Ge(1)] = 18
    steps: Annotated[int, Ge(1)] = 2400
    seeds: Annotated[int, Ge(1)] = 3

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.progress("workers beside their simulation", 0.0)
        run.put("unlike_simulation", _unlike(local=run.as_baseline))
        if run.quick:
            return
        run.progress("training of as many tokens", 0.05)
        runs, given = self._learning(run.seed)
        learned = run.context.keep("losses", lambda: _losses(runs, given), given=given, code=_CODE)
        losses: dict[str, list[float]] = learned.value
        summed = losses["every_step"]
        ours = run.pick(losses["co2"], summed)
        # Rounds as long whose averages are not late lose this much.
        bound = losses["local_sgd"][0] - summed[0]
        run.put("loss_gap", (a - b for a, b in zip(ours, summed, strict=True)), bound=bound)
        run.details["learned"] = learned.details()
        if run.lacks(unavailable(), *_TIMED):
            return
        # The A/A run has a baseline in the place of CO2 for each comparison.
        kinds = {"every_step": "every_step", "local_sgd": "local_sgd", "co2": "co2"}
        over_summed, over_local, kept = "co2", "co2", "co2"
        unshaped = kinds
        if run.as_baseline:
            over_summed, over_local, kept = (
                f"instead of {name}" for name in ("summed", "local", "co2")
            )
            kinds = kinds | {over_summed: "every_step", over_local: "local_sgd"}
            unshaped = {"co2": "co2", kept: "co2"}
        timed: _Times = {}
        free: _Times = {}
        # On one link and on the other, more than once: what drifts is in both.
        for visit in range(_VISITS):
            run.progress("rounds over a slow link", 0.5 + 0.5 * visit / _VISITS)
            self._time(timed, self.bandwidth, kinds)
            run.progress("the same on a link that nobody shapes", 0.7 + 0.5 * visit / _VISITS)
            self._time(free, None, unshaped)
        seconds = {name: [pair[0] for pair in pairs] for name, pairs in timed.items()}
        run.put("over_summed", seconds[over_summed], seconds["every_step"])
        run.put("over_local_sgd", seconds[over_local], seconds["local_sgd"])
        run.put("not_exposed", (1 - share for _, share in timed[over_local]))
        unlimited = {name: [pair[0] for pair in pairs] for name, pairs in free.items()}
        run.put("kept", run.pick(seconds["co2"], unlimited[kept]), unlimited["co2"])
        run.profile = ", ".join(
            f"{name} {1e3 * sorted(of)[len(of) // 2]:.0f} ms a step" for name, of in seconds.items()
        )

    def _job(self, sync: Any, seed: int = 0) -> TrainJob:
        return train_job(
            model="shoal-1m", seq_len=128, global_batch=8, parallel={"dp": 2}, sync=sync,
            optimizer={"name": "adamw", "lr": 4e-3, "beta1": 0.5}, seed=seed,
        )  # fmt: skip

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
            "jobs": [self._job(syncs[name], own).model_dump(mode="json") for name, own in runs],
            "config": mini(128, 6).model_dump(mode="json"),
            "steps": self.steps,
        }

    def _time(self, times: _Times, bandwidth: float | None, kinds: Mapping[str, str]) -> None:
        """Add a visit: every kind of steps on a link of so many byte/s; of the slower rank."""
        syncs = self._syncs()
        steps = [
            _SUMMED_STEPS if kind == "every_step" else _ROUNDS * self.tau for kind in kinds.values()
        ]
        link: AbstractContextManager[EmulatedNetwork | None] = contextlib.nullcontext()
        if bandwidth is not None:
            link = emulate(2, bandwidth=bandwidth, packet=self.packet)
        with link as network:
            ranks = on_ranks(
                f"{_RANKS}:time_rounds", 2, network=network, ranks_per_node=1, timeout_s=900.0,
                jobs=[self._job(syncs[kind]) for kind in kinds.values()], config=mini(128, 6),
                steps=steps, turns=-(-self.turns // _VISITS),
            )  # fmt: skip
        for name, turns in zip(kinds, zip(*ranks, strict=True), strict=True):
            both = [tuple(map(max, zip(*pairs, strict=True))) for pairs in zip(*turns, strict=True)]
            times.setdefault(name, []).extend(both)


def _losses(runs: list[str], given: dict[str, Any]) -> dict[str, JsonValue]:
    """Held-out loss by kind and seed, nats a byte."""
    losses = on_ranks(
        f"{_RANKS}:learn", 2, timeout_s=7200.0, steps=given["steps"],
        jobs=[TrainJob.model_validate(job) for job in given["jobs"]],
        config=ModelConfig.model_validate(given["config"]),
    )[0]  # fmt: skip
    return {
        name: [loss for own, loss in zip(runs, losses, strict=True) if own == name]
        for name in dict.fromkeys(runs)
    }


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
