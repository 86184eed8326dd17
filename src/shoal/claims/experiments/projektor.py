"""[83] Projektor: does transport from a few revealed rows predict the score of any mixture?

Source: Kang et al., Performance Scaling via Optimal Transport: Enabling Data Selection from
Partially Revealed Sources, 2023.

Three sources with skewed classes, of whose labels a fifth are drawn at random: digits, and patches
of photographs. 400 rows of each are revealed, probes have 200 and 400 rows, and scores of mixtures
of 1,200 rows, none of which was probed, are predicted. All fits see the same probes. Linear and
pseudo-quadratic fits differ from Projektor in what they know of a mixture alone; the log-linear fit
has the logarithm of each source's rows. The A/A run has what is compared with in Projektor's place.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.projektor_fits import BASELINES, measured_of, profile_of
from shoal.claims.experiments.projektor_tasks import MIXTURE_TASKS
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part


@part
class ProjektorClaim(BaseClaim, row=83, needs=("sklearn", "ot")):
    """Projected scores and chosen mixtures against measured ones.

    Args:
        draws: of sources and validation data.
    """

    draws: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Fit, project, measure; the quick run has the gradients of one draw."""
        cosines: list[float] = []
        names = ["digits"] if run.quick else list(MIXTURE_TASKS)
        for at, name in enumerate(names):
            results = []
            for draw in range(1 if run.quick else self.draws):
                run.progress(f"{name}, draw {draw + 1}", (at + draw / self.draws) / len(names))
                measured = partial(measured_of, MIXTURE_TASKS[name], draw, run.quick)
                results.append(run.remember(f"{name} {draw}", measured))
            cosines += [x for one in results for x in run.pick(one.calibrated, one.potentials)]
            if run.quick:
                continue
            errors = {fit: [one.errors[fit] for one in results] for fit in results[0].errors}
            best = min(BASELINES, key=lambda fit: float(np.mean(errors[fit])))
            bound = sum(one.noise for one in results) / sum(errors[best])
            ours = run.pick(errors["projektor"], errors[best])
            run.put(f"{name}_error", ours, errors[best], bound=bound)
            run.put(f"{name}_chosen", [run.pick(one.chosen, one.single) for one in results])
            run.details[f"{name}: mean absolute errors"] = errors
            run.profile += profile_of(name, [one.probed for one in results], errors)
        run.put("gradient_cosine", cosines)
