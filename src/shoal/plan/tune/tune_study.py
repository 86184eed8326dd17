"""``shoal explain tune``: search the splits of a training job by trials; what mattered?"""

from __future__ import annotations

from typing import ClassVar, Literal

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.tables import Table, digits
from shoal.cost.scaling_reports import scaling_report
from shoal.cost.shapes import resolve
from shoal.ir import Explanation, Machine, Progress, TrainJob
from shoal.plan.tune import TUNERS
from shoal.plan.tune.protocols import Setting
from shoal.plan.tune.shapley import explain as influences
from shoal.plan.tune.training import TrainingObjective, training_space


@part
class TuneStudy:
    """Tune parallelism, batches and recomputation of a training job in the simulator.

    Invalid configurations and those that do not fit are failed trials, from which the search
    learns. Axes: nodes, tp, pp, vpp, microbatch, accumulate, shard, recompute. All trials are saved
    as trials.yaml.

    **Examples**

        shoal explain tune "GPT-3 175B" --machine 128xFrontier --trials 64 --why

        shoal explain tune Llama-3-70B -m 64xH100 --fix recompute=full --fix accumulate=16,32

        shoal explain tune Qwen3-8B -m 8xH100 --tuner exhaustive --out trials

    Args:
        model: a model's name, or a directory.
        trials: configurations to try.
        tuner: bayes, random or exhaustive.
        seq_len: tokens of a sequence.
        nodes: numbers of nodes to try, such as 12,16; all if not given.
        fix: axis=value[,value...], such as microbatch=1,2,4.
        why: show the contribution of each axis, by Shapley values.
        weak: numbers of replicas, such as 2,4,6, for the weak scaling of the best configuration.
        surrogate: model that `why` explains: gp or forest.
        seed: seed of the search.
        top: trials to show.
    """

    subject: ClassVar = "model"

    model: str
    trials: int = 64
    tuner: str = "bayes"
    seq_len: int = 2048
    nodes: str | None = None
    fix: tuple[str, ...] = ()
    why: bool = False
    weak: str | None = None
    surrogate: Literal["gp", "forest"] = "gp"
    seed: int = 0
    top: int = 5

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """The best trials, and on demand what made the difference and how the best one scales."""
        job = TrainJob(model=self.model, seq_len=self.seq_len, precision="bf16")
        fixed = dict(_axis(word) for word in self.fix)
        if self.nodes is not None:
            fixed["nodes"] = _values("--nodes", self.nodes)
        space = training_space(resolve(self.model), machine, fixed)
        objective = TrainingObjective(job, machine)
        study = TUNERS.build(self.tuner, where="--tuner").tune(
            space, objective, self.trials, seed=self.seed, progress=progress
        )
        best = study.best
        winner, cost = objective.price(best.config)
        utilisation = objective.utilisation(winner, cost)
        result = influences(study, surrogate=self.surrogate, seed=self.seed) if self.why else []
        scaled = []
        if self.weak is not None:
            replicas = [int(value) for value in _values("--weak", self.weak)]
            scaled = scaling_report(winner, machine, replicas, kind="weak")
        shown = [axis.name for axis in space.axes if len(axis.values) > 1]
        ranked = sorted(study.feasible, key=lambda t: -(t.value or 0.0))[: self.top]
        blocks: list[Table | str] = [
            Table(
                title="trials, best first",
                columns=("TFLOP/s", *shown),
                rows=tuple((f"{t.value:.1f}", *(str(t.config[name]) for name in shown))
                           for t in ranked),
                right="r" * (len(shown) + 1),
            ),
            f"{len(study.trials)} of {space.size} configurations tried, "
            f"{len(study.trials) - len(study.feasible)} failed; the best reaches "
            f"{100 * utilisation:.1f} % of the peak with {winner.global_batch} sequences a step of "
            f"{digits(cost.step_s.value)} s; bottleneck: {cost.bound}",
        ]  # fmt: skip
        if result:
            blocks.append(Table(
                title="contribution of each axis in TFLOP/s (Shapley values)",
                columns=("axis", "influence", "in the best", "by value"),
                rows=tuple(
                    (
                        one.axis,
                        f"{one.influence:.2f}",
                        f"{one.best:+.2f}",
                        ", ".join(f"{value}: {mean:+.1f}" for value, mean in one.by_value.items()),
                    )
                    for one in result
                ),
                right=" rr",
            ))  # fmt: skip
        if scaled:
            blocks.append(Table(
                title="weak scaling of the best",
                columns=("devices", "replicas", "batch", "step", "efficiency"),
                rows=tuple(
                    (f"{p.devices}", f"{p.replicas}", f"{p.global_batch}", f"{digits(p.step_s)} s",
                     f"{p.efficiency:.1%}")
                    for p in scaled
                ),
                right="rrrrr",
            ))  # fmt: skip
        return Explanation(
            blocks=tuple(blocks),
            data={
                "best": best.model_dump(mode="json", exclude_none=True),
                "step_s": cost.step_s.model_dump(mode="json"),
                "global_batch": winner.global_batch,
                "utilisation": utilisation,
                "configurations": space.size,
                "trials": [t.model_dump(mode="json", exclude_none=True) for t in study.trials],
                "influence": [one.model_dump(mode="json") for one in result],
                "weak": [one.model_dump(mode="json") for one in scaled],
            },
            files={"trials.yaml": study.as_yaml("Trials of `shoal explain tune`.")},
        )


def _axis(word: str) -> tuple[str, tuple[Setting, ...]]:
    name, separator, text = word.partition("=")
    require(
        bool(separator and name and text),
        "--fix",
        word,
        expected="axis=value[,value...], such as microbatch=1,2",
    )
    return name, _values(f"--fix {name}", text)


def _values(where: str, text: str) -> tuple[Setting, ...]:
    words = [word.strip() for word in text.split(",")]
    require(all(words), where, text, expected="values with commas between them, such as 1,2,4")
    return tuple(int(word) if word.isdigit() else word for word in words)
