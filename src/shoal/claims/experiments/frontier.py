"""[9] Frontier recipe: does Bayesian tuning find good splits, and is the recipe in the model?

Source: Dash et al., Optimizing Distributed Training on Frontier for Large Language Models, 2023.

Simulated on the described machine: the tuner beside all configurations and random search; five
observations as statements about the cost model; the utilisation of the paper's two largest runs,
with degrees and batches of its table of best parameters. The A/A run has random search, and the
device's peak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import Choice, part
from shoal.cost.scaling_reports import scaling_report
from shoal.ir import Machine, ModelShape, Parallel, TrainJob
from shoal.machine.described import load
from shoal.plan.tune.bayes import Bayes
from shoal.plan.tune.exhaustive import Exhaustive
from shoal.plan.tune.protocols import SearchSpace, Setting, TuningResult
from shoal.plan.tune.random import Random
from shoal.plan.tune.shapley import explain
from shoal.plan.tune.training import TrainingObjective, training_space

# Share of the peak that the paper reports.
PAPER = {"22B": 0.3838, "175B": 0.3614, "1T": 0.3196}
# (blocks, hidden, heads) of GPT models.
_SIZES = {"22B": (48, 6144, 64), "175B": (96, 12288, 96), "1T": (128, 25600, 160)}
# (tp, pp, sequences of a replica, replicas, sequences of a strongly scaled step).
_RUNS = {"175B": (4, 16, 640, 16, 8000), "1T": (8, 64, 1600, 6, 8016)}
_USUAL: dict[str, Setting] = {
    "vpp": 1, "microbatch": 1, "shard": "zero1", "recompute": "full",
}  # fmt: skip
# A rate that moves by less over all of its steps is flat.
_FLAT = 0.10
# Up to the sixteen stages of the paper's 175B run, and its micro-batches for each of them.
_DEEP = (4, 8, 16)
_EACH = 40


def _gpt(name: str) -> ModelShape:
    layers, hidden, heads = _SIZES[name]
    return ModelShape(
        name=f"GPT {name}",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=4 * hidden,
        gated=False,
        vocab_size=51200,
        tied=True,
        attention="MHA",
        family="GPT",
    )


MODELS = {name: _gpt(name) for name in _SIZES}
_JOB = TrainJob(seq_len=2048, precision="bf16")


@part
class FrontierRecipe(BaseClaim, row=9):
    """Tuning GPT 175B on 1,024 dies, five rules, and two published runs.

    Args:
        trials: trials of each search.
        seeds: searches.
        explained: trials of the search from which the influence of the axes is learnt.
    """

    trials: Annotated[int, Ge(24)] = 48
    seeds: Annotated[int, Ge(1)] = 10
    explained: Annotated[int, Ge(24)] = 64

    def _scarce(self, seed: int) -> dict[str, Any]:
        """The same search on sixteen nodes, where 3 % of the configurations work."""
        objective, space = problem(16)
        every = Exhaustive().tune(space, objective, space.size)
        top = every.best.value or math.nan
        shares = [
            _share(Bayes().tune(space, objective, self.trials, seed=seed + number), top)
            for number in range(self.seeds)
        ]
        return {"working": len(every.feasible), "of": space.size, "shares": shares}

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        seeds = min(3, self.seeds) if run.quick else self.seeds
        objective, space = problem(128)
        run.progress("every configuration", 0.05)
        optimum = run.remember(
            "optimum", lambda: Exhaustive().tune(space, objective, space.size)
        ).best
        top = optimum.value or math.nan
        shares, random_shares = [], []
        for number in range(seeds):
            run.progress(f"search {number + 1} of {seeds}", 0.1 + 0.5 * number / seeds)
            plain = Random().tune(space, objective, self.trials, seed=run.seed + number)
            result = plain
            if not run.as_baseline:
                result = Bayes().tune(space, objective, self.trials, seed=run.seed + number)
            shares.append(_share(result, top))
            random_shares.append(_share(plain, top))
        run.put("share_of_optimum", shares, bound=1.0)
        run.put("gain_over_random", (a - b for a, b in zip(shares, random_shares, strict=True)))
        run.progress("five rules", 0.7)
        influence = run.remember("influence", lambda: _influence(self.explained, run.seed))
        broken = rules(influence, peak=run.as_baseline)
        run.put("rules_broken", broken.values())
        values = {}
        for name in _RUNS:
            run.progress(f"the run of {name}", 0.9)
            utilisation, model_share, more = published(name)
            run.put(f"utilisation_{name.lower()}", run.pick(utilisation, 1.0))
            values[name] = {
                "predicted": utilisation,
                "without_recomputation": model_share,
                "paper": PAPER[name],
                **more,
            }
        if not run.quick and not run.as_baseline:
            run.progress("where next to nothing fits", 0.95)
            run.details["sixteen_nodes"] = self._scarce(run.seed)
        run.profile = (
            f"optimum {top:.1f} TFLOP/s of {space.size} configurations; "
            f"shares {min(shares):.3f} to {max(shares):.3f}, random {np.mean(random_shares):.3f}"
        )
        run.details |= {
            "optimum": {"tflops": top, **{k: str(v) for k, v in optimum.config.items()}},
            "configurations": space.size,
            "random_shares": random_shares,
            "rules": {name: bool(wrong) for name, wrong in broken.items()},
            "influence": influence,
            "runs": values,
        }


def problem(nodes: int) -> tuple[TrainingObjective, SearchSpace]:
    """GPT 175B on so many nodes, and seven axes with at most 3,000 configurations."""
    objective = TrainingObjective(_JOB, load(f"{nodes}xFrontier"), model=MODELS["175B"])
    axes: dict[str, tuple[Setting, ...]] = {
        "tp": (1, 2, 4, 8),
        "pp": (2, 4, 8, 16, 32),
        "microbatch": (1, 2, 4, 8),
        "accumulate": (16, 32, 64),
    }
    return objective, training_space(objective.shape, objective.machine, axes)


def _share(study: TuningResult, top: float) -> float:
    """The best trial's rate over the optimum; 0 where every trial failed."""
    return max((t.value for t in study.trials if t.value is not None), default=0.0) / top


def rules(influence: Mapping[str, float], *, peak: bool = False) -> dict[str, bool]:
    """The paper's five observations: whether each is broken.

    Args:
        influence: axis -> how much it moves the objective, largest first.
        peak: put the device's peak in the place of the cost model.
    """
    model = MODELS["175B"]
    objective = TrainingObjective(_JOB, load("64xFrontier"), model=model)
    best = objective.machine.device.peak_flops["bf16"]

    def rate(**changes: Setting) -> float:
        usual: dict[str, Setting] = {"nodes": 16, "tp": 8, "pp": 16, "accumulate": 64}
        return best if peak else objective.rate(*objective.price({**_USUAL, **usual, **changes}))

    # One replica on as many nodes as it needs: what changes is the pipeline alone.
    flat = [rate(nodes=pp, pp=pp, accumulate=_EACH * pp) for pp in _DEEP]
    return {
        "tensor parallelism beyond a node is slower": not (rate(tp=16, pp=8) < rate(tp=8, pp=8)),
        "more micro-batches a stage are faster": not _rising(
            lambda m: rate(accumulate=m), (16, 32, 64, 128)
        ),
        "more stages at a fixed batch are slower": not _rising(
            lambda pp: -rate(nodes=pp, pp=pp, accumulate=64), _DEEP
        ),
        "more stages with as many micro-batches each are as fast": (
            max(flat) / min(flat) - 1 > _FLAT
        ),
        "the micro-batch has the most influence": next(iter(influence)) != "microbatch",
    }


def _rising(rate: Callable[[int], float], values: tuple[int, ...]) -> bool:
    results = [rate(value) for value in values]
    return all(a < b for a, b in itertools.pairwise(results))


def _influence(trials: int, seed: int) -> dict[str, float]:
    """Axis -> mean absolute Shapley value in the paper's own space, largest first."""
    objective = TrainingObjective(_JOB, load("16xFrontier"), model=MODELS["175B"])
    paper: Mapping[str, tuple[Setting, ...]] = {
        "nodes": (12, 16),
        "tp": (4, 8),
        "pp": (1, 2, 4, 8, 12, 16),
        "vpp": (1,),
        "microbatch": (4, 6, 8, 10, 12, 14, 16, 18, 20),
        "accumulate": (5, 10),
        "shard": ("replicated", "zero1"),
        "recompute": ("full",),
    }
    space = training_space(objective.shape, objective.machine, paper)
    study = Bayes().tune(space, objective, trials, seed=seed)
    return {one.axis: one.influence for one in explain(study, seed=seed)}


def published(name: str) -> tuple[float, float, dict[str, Any]]:
    """Predicted share of the peak of a published run, counted two ways, and how it scales.

    First as its engine counts, then without what is computed again.
    """
    tp, pp, batch, replicas, fixed = _RUNS[name]
    machine: Machine = load(f"{tp * pp * replicas // 8}xFrontier")
    job = _JOB.model_copy(
        update={
            "parallel": Parallel(dp=replicas, tp=tp, pp=pp),
            "global_batch": batch * replicas,
            "microbatch": 1,
            "shard": Choice(name="zero1"),
            "recompute": "full",
        }
    )
    shape = MODELS[name]
    objective = TrainingObjective(job, machine, model=shape, whole_flops=True)
    config = {"nodes": machine.nodes, "tp": tp, "pp": pp, "accumulate": batch}
    result, cost = objective.price({**_USUAL, **config})
    whole = objective.utilisation(result, cost)
    few = [dp for dp in (2, 4, 6, 8, 16) if dp <= replicas and fixed % dp == 0]
    weak = scaling_report(result, machine, few, kind="weak", shape=shape)
    strong_job = result.model_copy(update={"global_batch": fixed})
    strong = scaling_report(strong_job, machine, few, kind="strong", shape=shape)
    return (
        whole,
        0.75 * whole,
        {
            "weak_efficiency": weak[-1].efficiency,
            "strong_efficiency": strong[-1].efficiency,
            "memory_gb": cost.memory_total / 1e9,
            "bound": cost.bound,
            "terms_s": {k: float(v) for k, v in cost.terms_s.items()},
        },
    )
