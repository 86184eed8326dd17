"""``shoal explain memory``: which way to train beyond the device's memory?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, ClassVar

from shoal.core.errors import nearest, require
from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.cost.shapes import shape_of
from shoal.ir import Explanation, Machine, Progress, TrainJob, Work
from shoal.memory.fuyou.needs import predicted
from shoal.memory.fuyou.part import Fuyou
from shoal.plan.memory.offload import TIERS, OffloadOption, budgets_of, ways
from shoal.plan.memory.swap_study import curve_explained


@part
class MemoryStudy:
    """Compare the offloading methods for a training job.

    Every part of kind offload, with and without recomputation: bytes of each tier and the time of
    a step. Nothing runs. Exits with status 1 if none fits.

    **Examples**

        shoal explain memory shoal-16m --budget device=64MiB,host=256MiB

        shoal explain memory Llama-3-8B -m 1xRTX-4090 --budget device=20GiB,host=100GiB

        shoal explain memory shoal-16m --policy zero_infinity --global-batch 8 -o json

        shoal explain memory shoal-16m --policy fuyou --job '{grad_clip: 0}' --curve

    Args:
        model: a model's name or directory, or a job in YAML.
        budget: sizes of tiers, such as device=64MiB,host=256MiB.
        policy: one part of kind offload; all if not given.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        precision: fp32 or bf16.
        job: other keys of the job, such as {grad_clip: 0, parallel.dp: 2}.
        curve: with policy fuyou, show the step time as a function of the swapped bytes.
    """

    subject: ClassVar = "model"

    model: str
    budget: str = ""
    policy: str | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    curve: bool = False

    def __post_init__(self) -> None:
        known = TrainJob.model_fields
        for key in self.job:
            hint = nearest(key, known)
            require(
                key.partition(".")[0] in known,
                "study.memory.job",
                key,
                expected="a key of a training job",
                hint=hint or "see shoal train --schema",
            )

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """Every way, the fastest that fits first."""
        job = TrainJob.described(
            self.model,
            {
                "seq_len": self.seq_len,
                "global_batch": self.global_batch,
                "precision": self.precision,
                **self.job,
            },
        )
        shape, budgets = shape_of(job), budgets_of(self.budget)
        require(
            not self.curve or self.policy == "fuyou",
            "--curve",
            self.policy or "every policy",
            expected="--policy fuyou with it, which chooses what is swapped",
        )
        result = ways(job, shape, machine, budgets=budgets, only=self.policy)
        table = Table(
            title=f"{shape.name}: {job.global_batch} x {job.seq_len} tokens",
            columns=("offload", "recompute", *TIERS, "step", "fits"),
            rows=tuple(_row(way) for way in result),
            right="  rrrr",
        )
        notes = [
            f"{way.choice}: {why}" for way in result for why in (*way.notes, way.refused) if why
        ]
        blocks = (table, *dict.fromkeys(notes), _answer(result))
        data: Any = [{**asdict(way), "fits": way.fits} for way in result]
        if self.curve:
            curve = self._curve(Work(shape=shape, job=job), machine, budgets)
            blocks += curve.blocks
            data = {"ways": data, **curve.data}
        return Explanation(blocks=blocks, data=data, ok=result[0].fits)

    def _curve(self, work: Work, machine: Machine, budgets: Mapping[str, int]) -> Explanation:
        """The time of a step with Fuyou, by what it swaps."""
        fuyou = Fuyou(device_budget=budgets.get("device"), host_budget=budgets.get("host"))
        result = predicted(fuyou, work, machine)
        return curve_explained(result.iteration, result.ordered)


def _row(way: OffloadOption) -> tuple[str, ...]:
    if way.refused:
        return (way.choice, way.recompute, *("" for _ in TIERS), "", "refused")
    sizes = (way.tier_bytes.get(tier) for tier in TIERS)
    return (
        way.choice,
        way.recompute,
        *("" if size is None else human_bytes(size) for size in sizes),
        f"{digits(way.step_s)} s",
        "yes" if way.fits else f"no: {', '.join(way.beyond)}",
    )


def _answer(found: Sequence[OffloadOption]) -> str:
    """Which way is the fastest, or what the least one needs."""
    best = found[0]
    if best.fits:
        return f"fastest that fits: offload: {best.choice}, recompute: {best.recompute}"
    least = min(
        (way for way in found if "device" in way.tier_bytes),
        key=lambda way: way.tier_bytes["device"],
        default=None,
    )
    if least is None:
        return "none fits"
    return (
        f"none fits; the smallest device is {human_bytes(least.tier_bytes['device'])}, with "
        f"offload: {least.choice}, recompute: {least.recompute}"
    )
