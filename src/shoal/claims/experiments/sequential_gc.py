"""[8] SequentialGC: does redundancy over rounds beat gradient coding where workers slow down?

Source: Krishnan, Ram, Ebrahimi, Khisti, Sequential Gradient Coding for Straggler Mitigation, 2023.

16 worker processes compute real gradients of four convolutional networks that are trained in turn,
and sleep as long as a larger model would take: in proportion to their load, and longer while they
are slow, by a two-state chain. Every scheme has the parameters that the planner picks from a log
with other slow-downs. All schemes run in turn over the same processes and, in each
turn, through the same slow-downs. The A/A run has gradient coding in the place of M-SGC.
"""

from __future__ import annotations

from functools import partial

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.sequential_gc_runs import arm_of, checked_of, picked_of, processed_of
from shoal.claims.frame import ClaimRun
from shoal.core.parts import Choice, part
from shoal.fields.federate.coded.execute import coded_server
from shoal.fields.federate.coded.job import CodedJob
from shoal.fields.federate.coded.planning import examples_of


@part
class SequentialGCClaim(BaseClaim, row=8, needs=("torch", "safetensors", "sklearn"), cores=2):
    """Total time of all gradients, by scheme.

    Args:
        gradients: of all models together.
        turns: of measurement; all schemes run in each.
    """

    gradients: int = 20
    turns: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Log, pick, check, time; the quick run has few workers and a linear model."""
        job = CodedJob(
            workers=16, models=4, gradients=self.gradients, examples=96, data_s=2.4,
            slow_chance=0.05, slow_recovery=0.7, slow_factor=8.0, seed=run.seed,
        )  # fmt: skip
        if run.quick:
            small = {
                "workers": 4,
                "learner": Choice(name="logistic"),
                "data_s": 0.2,
                "gradients": 8,
            }
            job = job.model_copy(update=small)
        data, _ = examples_of(job)
        with coded_server(job, data) as server:
            run.progress("log of times", 0.0)
            picked = run.remember("picked", partial(picked_of, server, job, run))
            checked = run.remember(
                "checked",
                lambda: {name: checked_of(server, one, data) for name, one in picked.items()},
            )
            run.progress("loads", 0.1)
            processed = run.remember(
                "processed", partial(processed_of, server, 2 if run.quick else 3)
            )
            run.put("load_over_gc", run.pick(*processed), processed[1])
            wrong, loads = zip(*checked.values(), strict=True)
            run.put("gradient_error", max(wrong))
            run.put("load_error", max(loads))
            run.details["schemes"] = {name: str(one) for name, one in picked.items()}
            if run.quick:
                return
            places = {**picked, "m_sgc": run.pick(picked["m_sgc"], picked["gc"])}
            arms = {name: arm_of(server, one) for name, one in places.items()}
            run.progress(", ".join(map(str, places.values())), 0.2)
            seconds = run.turns(arms, self.turns)
        run.put("over_gc", seconds["m_sgc"], seconds["gc"])
        run.put("over_uncoded", seconds["m_sgc"], seconds["uncoded"])
        run.details["seconds"] = seconds
