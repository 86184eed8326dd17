"""[23] DDM: do diffusion experts that never talk equal one model of all the data?

Source: McAllister et al., Decentralized Diffusion Models, 2025.

Handwritten digits, four clusters, networks that are small for their data. Each expert is a process;
experts take as many training samples as one model of their shape, which gets, in further steps, the
FLOPs of the router too. Gradients of the one model are counted on four ranks. The A/A run has that
model twice.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import Choice, part, table
from shoal.core.scratch import scratch_directory
from shoal.fields.federate.ddm.execute import execute, scaled
from shoal.fields.federate.ddm.experts import DiffusionExperts
from shoal.fields.federate.ddm.job import TrainExpertsJob
from shoal.fields.federate.ddm.planning import examples_of, plan_experts, whole_task
from shoal.fields.federate.ddm.quality import ClassifierFeatures
from shoal.fields.running import RunOutcome, RunProgress
from shoal.kernel.threads import torch_threads
from shoal.machine import load

_K = 4
_EXPERTS = Choice(
    name="experts", options={"k": _K, "fine": 128, "tolerance": 0.05, "router_width": 16}
)
_MONOLITH = Choice(name="monolith")
_RANKS = Choice(name="monolith", options={"ranks": _K})


@part
class DDMClaim(BaseClaim, row=23, needs=("torch",)):
    """Experts and one model, with equal training samples.

    Args:
        seeds: of data splits and trainings.
        steps: of each network.
        samples: that are compared with the data.
    """

    seeds: int = 3
    steps: int = 2000
    samples: int = 5000

    def collect(self, run: ClaimRun) -> None:
        """Count bytes on ranks, train, compare; the quick run only counts."""
        counted = run.remember("bytes", partial(_bytes, 10))
        sent = counted["ranks"]
        run.put("island_bytes", run.pick(counted["experts"], sent), sent)
        run.put("bytes_apart", abs(sent / counted["predicted"] - 1))
        if run.quick:
            return
        rows = []
        for seed in range(self.seeds):
            run.progress(f"seed {seed + 1} of {self.seeds}", seed / self.seeds)
            rows.append(run.remember(f"seed {seed}", partial(self._trained, seed)))
        one = [row["one_loss"] for row in rows]
        run.put("validation_loss", run.pick([row["loss"] for row in rows], one), one)
        one = [row["one_frechet"] for row in rows]
        for mode in ("top1", "sample", "full"):
            run.put(f"frechet_{mode}", run.pick([row[mode] for row in rows], one), one)
        run.details["seeds"] = rows

    def _trained(self, seed: int) -> dict[str, float]:
        """Losses on held-out images and Fréchet distances, of both."""
        from shoal.fields.federate.ddm.ensemble import load_ensemble

        job = TrainExpertsJob(
            steps=self.steps, batch=64, width=40, depth=2, lr=3e-3, samples=64, seed=seed
        )
        train, test, *_ = scaled(*examples_of(job))
        features = ClassifierFeatures.of(train, seed)
        shape = whole_task(job, train.x.shape[1], train.classes).shape
        router: DiffusionExperts = table("flow_training").build(_EXPERTS)
        more = router.router_shape(shape).flops / shape.flops
        found = {"router_share": more}
        with scratch_directory("ddm") as root, torch_threads(1):
            _run(job, _EXPERTS, root / "experts")
            longer = job.model_copy(update={"steps": round(job.steps * (1 + more))})
            _run(longer, _MONOLITH, root / "one")
            experts, one = load_ensemble(root / "experts"), load_ensemble(root / "one")

            def distance(model: Any, mode: str) -> float:
                drawn = model.sample(self.samples, mode=mode, seed=seed).reshape(self.samples, -1)
                low, high = model.low, model.high
                return features.distance(2 * (drawn - low) / (high - low) - 1)

            found["loss"], found["one_loss"] = experts.loss(test.x), one.loss(test.x)
            found["one_frechet"] = distance(one, "full")
            found |= {mode: distance(experts, mode) for mode in ("top1", "full", "sample")}
        return found


def _bytes(steps: int) -> dict[str, float]:
    """Between the processes of experts, and of one model on as many ranks, in a few steps."""
    job = TrainExpertsJob(steps=steps, batch=64, width=64, depth=2, samples=64, sample_steps=2)
    with scratch_directory("ddm") as root:
        apart, ranks = (
            _run(job, choice, root / str(at)).measured["network_bytes"]
            for at, choice in enumerate((_EXPERTS, _RANKS))
        )
    (plan,) = plan_experts(job.model_copy(update={"method": _EXPERTS}), load("laptop"))
    predicted = plan.predicted["gradient_bytes"].value
    return {"experts": apart, "ranks": ranks, "predicted": predicted}


def _run(job: TrainExpertsJob, method: Choice, folder: Path) -> RunOutcome:
    (plan,) = plan_experts(job.model_copy(update={"method": method}), load("laptop"))
    folder.mkdir()
    progress = RunProgress(folder, None, lambda kind, **fields: None, None)
    return execute(plan, progress)
