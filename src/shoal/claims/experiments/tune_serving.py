"""[122] Hyper-parameters of serving: is their landscape rugged, and is tuning again worth it?

Source: Understanding the Impact of Hyperparameters on LLM Inference Performance: vLLM vs
HuggingFace Pipelines, 2024.

Two machines are one core and two cores of this one, by affinity, with as many threads. Two models
serve the same requests under every setting of Shoal's engine and of Hugging Face ``generate``,
round by round in a new order. Tuning again is judged in rounds that did not choose. The quick run
searches a known landscape with noise.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import serve_job
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.plan.tune import TUNERS
from shoal.plan.tune.landscape import Landscape, transfer_gain
from shoal.plan.tune.protocols import Axis, Config, SearchSpace, TrialOutcome, Tuner
from shoal.plan.tune.serving import serving_space

if TYPE_CHECKING:
    from shoal.ir import Arrival
    from shoal.plan.tune.serving import Measure

_SEARCHES, _STARTS = 20, 5
_CORES = (1, 2)
_LIMIT_S = 20.0

_SHOAL = serving_space(
    {"max_running": (2, 8, 16, 32), "max_step_tokens": (32, 128, 512), "block_size": (8, 32)}
)
_GENERATE = SearchSpace(
    axes=(
        Axis(name="batch", values=(2, 4, 8, 12, 16, 24, 32)),
        Axis(name="padding", values=("longest", "sorted", "full")),
    )
)
_SPACES = {"shoal": _SHOAL, "generate": _GENERATE}

_KNOWN = serving_space({"max_running": (1, 2, 4, 8, 16, 32, 64), "block_size": (16,)})


def _known(config: Config) -> float:
    """A broad peak and a higher one, in tokens per second; above 16 K both is no memory."""
    x = math.log2(float(config["max_running"]))
    y = math.log2(float(config["max_step_tokens"])) - 6
    high = 120 * math.exp(-((x - 4) ** 2 + (y - 3) ** 2) / 2.5)
    return 60 + high + 70 * math.exp(-((x - 1) ** 2 + (y - 1) ** 2) / 1.2)


_KNOWN_PEAKS = [
    {"max_running": 16, "max_step_tokens": 512, "block_size": 16},
    {"max_running": 2, "max_step_tokens": 128, "block_size": 16},
]


@part
class TuneServing(BaseClaim, row=122, needs=("torch", "transformers")):
    """Landscapes of two engines on two machines, and what tuning again is worth.

    Args:
        models: models of the zoo, with random weights.
        requests: served at a time.
        rounds: times that every setting is measured.
        noise: noise of the known landscape, as a share.
    """

    models: tuple[str, ...] = ("shoal-0.3m", "shoal-4m")
    requests: Annotated[int, Ge(1)] = 40
    rounds: Annotated[int, Ge(2)] = 3
    noise: Annotated[float, Gt(0), Lt(1)] = 0.02

    def __post_init__(self) -> None:
        require(bool(self.models), "claim.tune_serving.models", (), expected="at least one")

    def refuses(self, context: ExperimentContext) -> str | None:
        """Engines, two cores, and a way to keep to one of them."""
        if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < max(_CORES):
            return f"fewer than {max(_CORES)} cores, or a system that cannot keep a process to some"
        return super().refuses(context)

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        self._on_known(run)
        if run.quick:
            return
        lands = run.remember("landscapes", lambda: self._landscapes(run.context))
        gains: list[float] = []
        most: list[float] = []
        ways = (_CORES, _CORES[::-1])
        for engine, model, (home, away) in itertools.product(_SPACES, self.models, ways):
            both = lands[engine, model, home], lands[engine, model, away]
            gains += transfer_gain(*both)
            most.append(_most(*both))
        shares: list[float] = []
        for who, land in lands.items():
            shares += self._shares(land, run.seed, as_baseline=run.as_baseline)
            run.details["{}, {}, {} cores".format(*who)] = {
                "best": dict(land.best),
                "peaks": [dict(peak) for peak in land.peaks()],
                "turns": [f"{turn.axis} at {turn.config}" for turn in land.turns()],
            }
        # Moved settings in the place of tuned ones: no gain at all.
        again = (run.pick(1 + gain, 1.0) for gain in gains)
        run.put("retuned_vs_moved", again, bound=float(np.mean(most)))
        run.put("significant_turns", sum(len(land.turns()) for land in lands.values()))
        run.put("best_over_worst", (land.ratio for land in lands.values()))
        run.put("search_share", shares)
        spreads = [land.noise[0] for land in lands.values()]
        run.profile = f"noise of one measurement {min(spreads):.1%} to {max(spreads):.1%}"

    def _on_known(self, run: ClaimRun) -> None:
        """Searches of the known landscape, and its peaks as they are seen through noise."""
        top = max(map(_known, _KNOWN.configs()))
        shares, wrong = [], []
        for index in range(_SEARCHES):
            draw = generator(run.seed, purpose="known landscape", index=index)

            def objective(config: Config, draw: np.random.Generator = draw) -> TrialOutcome:
                if float(config["max_running"]) * float(config["max_step_tokens"]) > 2**14:
                    return TrialOutcome(failure="out of memory")
                seen = [
                    _known(config) * (1 + self.noise * float(draw.standard_normal()))
                    for _ in range(3)
                ]
                return TrialOutcome(value=float(np.mean(seen)), samples=tuple(seen))

            search = _tuner(run.as_baseline).tune
            study = search(_KNOWN, objective, _KNOWN.size, seed=run.seed + index)
            good = [_known(trial.config) >= 0.95 * top for trial in study.trials]
            shares.append((good.index(True) + 1) / _KNOWN.size)
            wrong.append(Landscape.of(study).peaks() != _KNOWN_PEAKS)
        run.put("known_search_share", shares)
        run.put("known_peaks_missed_or_false", wrong)

    def _shares(self, land: Landscape, seed: int, *, as_baseline: bool) -> list[float]:
        """Share of a measured landscape that a search looks at before it has 95 % of the best."""
        level = {row: float(np.mean(values)) for row, values in land.samples.items()}
        top = max(level.values())

        def objective(config: Config) -> TrialOutcome:
            row = land.space.row(config)
            if row not in level:
                return TrialOutcome(failure="failed on this machine")
            return TrialOutcome(value=level[row], samples=tuple(land.samples[row]))

        shares = []
        for index in range(5):
            study = _tuner(as_baseline).tune(
                land.space, objective, land.space.size, seed=seed + index
            )
            good = [(trial.value or 0.0) >= 0.95 * top for trial in study.trials]
            shares.append((good.index(True) + 1) / land.space.size)
        return shares

    def _landscapes(self, context: ExperimentContext) -> dict[tuple[str, str, int], Landscape]:
        """(engine, model, cores) -> what every setting gave, in rounds."""
        runners = self._runners(context)
        workloads = {model: self._workload(context, model) for model in self.models}
        places = [
            (engine, model, row)
            for engine, space in _SPACES.items()
            for model in self.models
            for row in map(tuple, space.indices().tolist())
        ]
        seen = {who: defaultdict[tuple[int, ...], list[float]](list) for who in runners}
        failed = {who: set[tuple[int, ...]]() for who in runners}
        # The first round warms up.
        for turn in range(-1, self.rounds):
            for cores in _CORES[:: -1 if turn % 2 else 1]:
                draw = generator(context.seed, purpose="order of settings", step=turn, index=cores)
                with _on(cores):
                    for number, place in enumerate(draw.permutation(len(places))):
                        if turn < 0 and number >= 16:
                            break
                        engine, model, row = places[int(place)]
                        sample = runners[engine, model, cores].measure(
                            _SPACES[engine].config(row), workloads[model], _LIMIT_S
                        )
                        if turn < 0:
                            continue
                        if sample.failed:
                            failed[engine, model, cores].add(row)
                        else:
                            seen[engine, model, cores][row].append(sample.throughput)
                context.progress(f"{cores} cores", max(0, turn) / self.rounds)
        return {
            who: Landscape(
                _SPACES[who[0]],
                {row: values for row, values in found.items() if row not in failed[who]},
                frozenset(failed[who]),
            )
            for who, found in seen.items()
        }

    def _runners(self, context: ExperimentContext) -> Mapping[tuple[str, str, int], Measure]:
        """(engine, model, cores) -> what serves."""
        from shoal.claims.bench.serving.generate import GenerateRunner
        from shoal.model import huggingface
        from shoal.serve.bench.replay import weights_of
        from shoal.serve.bench.tune import ShoalRunner
        from shoal.train import zoo

        runners: dict[tuple[str, str, int], Measure] = {}
        for model in self.models:
            where = Path(context.work_dir, model)
            huggingface.write(where, zoo.random(model, context.seed))
            for cores in _CORES:
                job = serve_job(where, threads=cores, max_position=512, kv_tokens=32 * 512)
                with _on(cores):
                    weights, _ = weights_of(job)
                    runners["shoal", model, cores] = ShoalRunner(job=job, model=weights)
                    peer = GenerateRunner.load(str(where), threads=cores)
                    runners["generate", model, cores] = peer
        return runners

    def _workload(self, context: ExperimentContext, model: str) -> Sequence[Arrival]:
        """Requests that are all there at once: prompts of 16 to 384 tokens, answers of 8 to 64."""
        from shoal.ir import Arrival
        from shoal.train import zoo

        draw = generator(context.seed, purpose="requests to tune with")
        vocab = zoo.config(model).vocab_size
        results = []
        for _ in range(self.requests):
            prompt = draw.integers(0, vocab, round(16 * 24 ** float(draw.random())))
            answer = round(8 * 8 ** float(draw.random()))
            results.append(Arrival(0.0, tuple(int(one) for one in prompt), answer))
        return results


def _most(home: Landscape, away: Landscape) -> float:
    """The most that tuning again can give: the best mean over that of the moved settings.

    Chosen and judged by the same rounds, so more than it really is.
    """
    moved = max(set(home.level) & set(away.level), key=lambda row: home.level[row])
    return math.exp(max(away.level.values()) - away.level[moved])


def _tuner(as_baseline: bool) -> Tuner:
    part: Tuner = TUNERS.build(
        {"name": "random"} if as_baseline else {"name": "bayes", "starts": _STARTS}
    )
    return part


@contextmanager
def _on(cores: int) -> Iterator[None]:
    """All threads of this process on so many cores, and as many threads as cores."""
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()

    def keep(allowed: set[int]) -> None:
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), allowed)
            except ProcessLookupError:  # it has ended
                continue

    keep(set(sorted(before)[:cores]))
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        keep(set(before))
        torch.set_num_threads(threads)
