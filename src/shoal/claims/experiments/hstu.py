"""[75] HSTU: does attention without a softmax say better what comes next when items keep appearing?

Source: Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations, 2024.

Records of 64 events are learned in one pass, in their order, and the last tenth is judged at every
event against all items. Beside HSTU learn the same network with a softmax, and a transformer with
as many layers whose attention is torch's. The A/A run has each baseline in its
place, whole histories, and candidates scored one by one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.recommend_arms import best_hits, cached_and_single, hits_of, task_of
from shoal.core.parts import part
from shoal.fields.retrieve.recommend.events import drawn_streams, kept_events, split_events

_ARMS = {
    "hstu": ("hstu", {}),
    "softmax": ("hstu", {"weights": "softmax"}),
    "transformer": ("sasrec", {}),
}
# Of stochastic length, and the events of a long history.
_ALPHA, _LONG = 1.6, 511


@part
class HSTUClaim(BaseClaim, row=75, needs=("torch",)):
    """Drawn streams, long histories, and candidates behind a cache.

    Args:
        records: of 64 events.
        long_records: of 512 events.
        seeds: of records and networks.
        rounds: of each timing.
    """

    records: int = 20_000
    long_records: int = 1_200
    seeds: int = 3
    rounds: int = 7

    def collect(self, run: ClaimRun) -> None:
        """Learn every arm with every seed; the quick run has few records, and the cache."""
        self._cached(run, 32 if run.quick else 256)
        alpha = run.pick(_ALPHA, 2.0)
        kept = kept_events(np.full(1000, _LONG), alpha, _LONG, np.random.default_rng(run.seed))
        run.put("attention_left", sum(len(one) ** 2 for one in kept) / (len(kept) * _LONG**2))
        if run.quick:
            return
        found: dict[str, list[float]] = {name: [] for name in [*_ARMS, "best"]}
        for seed in self._seeds(run):
            events = drawn_streams(self.records, seed=seed)
            split = split_events(events, leave_last=False, length=63)
            for name, arm in _ARMS.items():
                run.progress(f"seed {seed}: {name}", 0.2 + 0.5 * (seed - run.seed) / self.seeds)
                hits = partial(hits_of, split, task_of(63, seed), *arm)
                found[name].append(run.remember(f"{name} {seed}", hits))
            found["best"].append(best_hits(self.records, split, seed))
        run.details["hr10"] = found
        most = {name: sum(found["best"]) / sum(one) for name, one in found.items()}
        said = (f"{name} {1 / one:.0%}" for name, one in most.items())
        run.profile = f"of the hits that are possible: {', '.join(said)}"
        for name in ("softmax", "transformer"):
            bound = most[name]
            run.put(f"over_{name}", found[run.pick("hstu", name)], found[name], bound=bound)
        self._long(run)
        self._steps(run)

    def _seeds(self, run: ClaimRun) -> range:
        return range(run.seed, run.seed + self.seeds)

    def _long(self, run: ClaimRun) -> None:
        """Stochastic length: what it costs."""
        hits: list[list[float]] = [[], []]
        for seed in self._seeds(run):
            run.progress(f"long histories: seed {seed}", 0.7 + 0.2 * (seed - run.seed) / self.seeds)
            events = drawn_streams(
                self.long_records, items=500, categories=20, length=_LONG + 1, seed=seed
            )
            split = split_events(events, leave_last=False, length=_LONG)
            task = task_of(
                _LONG, seed, items=500, blocks=2, epochs=4, batch=4, lr=4e-3, shuffle=True
            )
            for alpha, found in zip((run.pick(_ALPHA, 2.0), 2.0), hits, strict=True):
                some = partial(hits_of, split, task, "hstu", {"alpha": alpha})
                found.append(run.remember(f"long {alpha} {seed}", some))
        run.put("short_hits", *hits)

    def _cached(self, run: ClaimRun, candidates: int) -> None:
        """Candidates behind a history that is kept, and one by one behind the whole history."""
        ways = dict(zip(("cached", "singly"), cached_and_single(candidates, run.seed), strict=True))
        apart = float(np.abs(ways["cached"]() - ways["singly"]()).max())
        run.put("cached_apart", run.pick(apart, 0.0))
        if not run.quick:
            run.versus(ways, {"cached_over_singly": ("cached", "singly")}, self.rounds, threads=1)

    def _steps(self, run: ClaimRun) -> None:
        """Seconds of a training step for each of its operations, beside torch's attention."""
        from shoal.fields.retrieve.recommend.networks import ItemTraining, shape_of
        from shoal.model.hstu import HSTULayer, TransformerLayer

        split = split_events(drawn_streams(1000, seed=run.seed), leave_last=False, length=63)
        task = task_of(63, run.seed)
        shape = shape_of(task)
        made = {
            name: ItemTraining(task, shape, layer, split.train, 2.0)
            for name, layer in (("hstu", HSTULayer), ("transformer", TransformerLayer))
        }
        arms = {name: one.step for name, one in made.items()}
        seconds = run.race(arms, 3 * self.rounds, swaps={"hstu": "transformer"}, threads=1)
        flops = {name: one.model.network.flops(63) for name, one in made.items()}
        run.put(
            "step_per_flop",
            [one / flops[run.pick("hstu", "transformer")] for one in seconds["hstu"]],
            [one / flops["transformer"] for one in seconds["transformer"]],
        )
