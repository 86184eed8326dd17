"""Bayesian search: try what is expected to improve most, and learn what fails.

A surrogate learns the objective from the trials. A trial that failed (out of memory, an
illegal split) is not dropped: it stays at the worst value that was seen, and further surrogates
learn what fails: how much of a limited thing a configuration needs, where its trial says so, and
else whether it works at all. The next trial has the largest product of expected improvement and
probability to work. Trials that are still running are taken for what the surrogate expects
on average (the constant liar), so several can run at a time. Where trials were measured time
after time, the surrogate knows how sure their means are, and improvement is over what it believes
to be the best.

Sources: Jones, Schonlau and Welch, Efficient Global Optimization of Expensive Black-box
Functions, 1998; Ginsbourger, Le Riche and Carraro, Kriging Is Well-suited to Parallelize
Optimization, 2010 (constant liar); Huang et al., Global Optimization of Stochastic Black-box
Systems via Sequential Kriging Meta-models, 2006 (noise); Gardner et al., Bayesian Optimization
with Inequality Constraints, 2014 (what a configuration needs); Dash et al., Optimizing
Distributed Training on Frontier for Large Language Models, 2023 (the use, with failures).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le
from scipy.special import ndtr

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.plan.tune.protocols import (
    Objective,
    Progress,
    SearchSpace,
    Trial,
    TuningResult,
    check,
    order,
)
from shoal.plan.tune.surrogate import Surrogate, fit_surrogate

# Configurations whose improvement is computed for one choice.
MOST_CANDIDATES = 5000
# Variance of a failure's value, in variances of all values: where its need explains it, and else.
UNSEEN = 1000.0
FAILED = 0.0


def penalised(trials: Sequence[Trial]) -> np.ndarray:
    """Values of trials, [N]; a failure has the worst value that was seen."""
    seen = [trial.value for trial in trials if trial.value is not None]
    worst = min(seen, default=0.0)
    return np.array([worst if trial.value is None else trial.value for trial in trials])


@part
class Bayes:
    """Expected improvement with failures; the default.

    Args:
        starts: number of random trials before the surrogate is used; more while all of them fail.
        surrogate: gp (Gaussian process) or forest (random forest; requires scikit-learn).
        parallel: number of trials that run concurrently, in threads.
        explore: smallest improvement that counts, as a share of the spread of the values.
    """

    starts: Annotated[int, Ge(2)] = 16
    surrogate: Literal["gp", "forest"] = "gp"
    parallel: Annotated[int, Ge(1), Le(1024)] = 1
    explore: Annotated[float, Ge(0), Le(1)] = 0.0

    def tune(
        self,
        space: SearchSpace,
        objective: Objective,
        trials: int,
        *,
        seed: int = 0,
        history: Sequence[Trial] = (),
        elsewhere: Sequence[Trial] = (),
        progress: Progress | None = None,
    ) -> TuningResult:
        seen = check(space, trials, history)
        rows = space.indices()
        points = space.points(rows)
        where = {tuple(int(at) for at in row): place for place, row in enumerate(rows)}
        done = [where[row] for row in (space.row(trial.config) for trial in history)]
        made = list(history)
        free = np.ones(len(rows), dtype=bool)
        free[[where[row] for row in seen]] = False
        places = order(space, seed, elsewhere)
        with ThreadPoolExecutor(self.parallel) as pool:
            while len(made) < trials and free.any():
                wanted = min(self.parallel, trials - len(made), int(free.sum()))
                if len(made) < self.starts or _blind(made):
                    wanted = min(wanted, max(1, self.starts - len(made)))
                    chosen = [int(place) for place in places if free[place]][:wanted]
                    free[chosen] = False
                else:
                    chosen = self._choose(points, free, done, made, wanted, seed)
                configs = [space.config(rows[place]) for place in chosen]
                made += pool.map(lambda config: Trial.of(config, objective), configs)
                done += chosen
                if progress is not None:
                    best = max((t.value for t in made if t.value is not None), default=None)
                    said = "none works yet" if best is None else f"best {best:.4g}"
                    progress(len(made), trials, said)
        return TuningResult(tuner="bayes", space=space, trials=tuple(made), seed=seed)

    def _choose(
        self,
        points: np.ndarray,
        free: np.ndarray,
        done: Sequence[int],
        made: Sequence[Trial],
        wanted: int,
        seed: int,
    ) -> list[int]:
        """Places to try next; they are no longer free."""
        values = penalised(made)
        works = np.array([trial.value is not None for trial in made], dtype=float)
        need = np.array([np.nan if t.excess is None else t.excess for t in made], dtype=float)
        spread = float(values.var()) or 1.0
        noise = np.array([trial.doubt for trial in made]) / spread
        at = list(done)
        chosen: list[int] = []
        random = generator(seed, purpose="tune candidates", step=len(made))
        for _ in range(wanted):
            open_ = np.flatnonzero(free)
            if len(open_) > MOST_CANDIDATES:
                open_ = random.choice(open_, MOST_CANDIDATES, replace=False)
            request = points[open_]
            score = self._odds(points[at], works, need, request, seed)
            if works.any():
                # What failed by its need is learnt there; its own value was not seen.
                doubt = np.where(works > 0, 0.0, np.where(need > 0, UNSEEN, FAILED))
                doubt = doubt + noise
                surrogate = fit_surrogate(self.surrogate, points[at], values, seed, doubt)
                step = self.explore * float(values[works > 0].std())
                best = values[works > 0]
                if noise.any():
                    # The largest of noisy values is too large; what is believed there is not.
                    best = surrogate.mean(points[at][works > 0])
                gain = _improvement(surrogate, request, float(best.max()) + step)
                # Where nothing is expected to improve, doubt decides.
                nothing = float(gain.max()) <= 1e-12 * float(values.std())
                score = score * (surrogate.predict(request)[1] if nothing else gain)
            place = int(open_[int(np.argmax(score))])
            chosen.append(place)
            free[place] = False
            at.append(place)
            values = np.append(values, values.mean())
            works = np.append(works, 1.0)
            need = np.append(need, np.nan)  # no value is assumed for it
            noise = np.append(noise, 0.0)
        return chosen

    def _odds(
        self,
        points: np.ndarray,
        works: np.ndarray,
        need: np.ndarray,
        asked: np.ndarray,
        seed: int,
    ) -> np.ndarray:
        """Probability to work, [N]: of needing no more than there is, and of working else."""
        odds = np.ones(len(asked))
        result = ~np.isnan(need)
        if (need[result] > 0).any():
            fitted = fit_surrogate(self.surrogate, points[result], need[result], seed)
            middle, doubt = fitted.predict(asked)
            odds = odds * ndtr(-middle / np.maximum(doubt, 1e-9))
        # What failed by its need would have worked, had there been more.
        able = np.where(result, 1.0, works)
        if able.min() < 1:
            fitted = fit_surrogate(self.surrogate, points, able, seed)
            middle, doubt = fitted.predict(asked)
            odds = odds * ndtr((middle - 0.5) / np.sqrt(doubt**2 + 0.05))
        return np.asarray(np.maximum(odds, 1e-12))


def _blind(trials: Sequence[Trial]) -> bool:
    """Nothing worked, and no trial shows how far it is from working."""
    return all(trial.value is None and trial.excess is None for trial in trials)


def _improvement(surrogate: Surrogate, points: np.ndarray, best: float) -> np.ndarray:
    """Expected improvement over ``best``, [N]."""
    middle, doubt = surrogate.predict(points)
    z = (middle - best) / doubt
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return np.asarray(doubt * (z * ndtr(z) + density))
