"""``shoal explain peft``: which fine-tuning method fits?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge

from shoal.core.counts import Count
from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.core.sizes import Size, human_bytes
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress, TrainJob
from shoal.plan.peft import PeftOption, advise

_CAUSES = ("base", "adapter", "gradients", "optimizer", "activations", "logits", "runtime")
# Tokens of a sequence of a short training.
_SHORT = 128


@part
class PeftStudy:
    """Rank the fine-tuning methods for a model on a machine.

    **Examples**

        shoal explain peft Qwen3-14B --machine 1xH100 --tokens 20M

        shoal explain peft Llama-3-8B -m 1xRTX-4090 --must-merge

        shoal explain peft Llama-3-8B -m 1xH100 --tenants 16 -o json

        shoal explain peft runs/base/export --search runs/base/export --share 0.03

    Args:
        model: a model's name or directory, or a job in YAML.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        tokens: training tokens, such as 20M.
        budget: memory budget of a device, such as 24GiB.
        must_merge: only methods that merge, so that serving costs no more than the base model.
        tenants: adapters served on one base.
        top: methods to show.
        probe: train the first three for fifty steps on this model directory.
        share: largest share of trained parameters, such as 0.03.
        search: search for method, targets and rank by successive halving of short trainings on this
            model directory.
    """

    subject: ClassVar = "model"

    model: str
    seq_len: int | None = None
    global_batch: int | None = None
    tokens: Count | None = None
    budget: Size | None = None
    must_merge: bool = False
    tenants: Annotated[int, Ge(1)] = 1
    top: int = 10
    probe: Path | None = None
    share: float | None = None
    search: Path | None = None

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        job = TrainJob.described(
            self.model,
            {"seq_len": self.seq_len, "global_batch": self.global_batch, "tokens": self.tokens},
        )
        request = partial(
            advise,
            job,
            machine,
            budget_bytes=self.budget,
            must_merge=self.must_merge,
            tenants=self.tenants,
            share=self.share,
        )
        if self.search is not None:
            from shoal.train.peft.probe import candidates

            return _searched(self.search, request(methods=candidates()), job)
        result = request()
        learned: dict[str, float] = {}
        if self.probe is not None:
            from shoal.train.peft.probe import probe

            first = [one.method for one in result if one.fits][:3]
            length = min(job.seq_len, _SHORT)
            learned = probe(self.probe, first, seq_len=length, seed=job.seed, data=job.data)
            result.sort(key=lambda one: (not one.fits, -learned.get(one.method.name, -1e9)))
        shown = result[: self.top]
        return Explanation(
            blocks=(
                Table(
                    title=f"fine-tuning of {job.model}",
                    columns=("method", "trains", "share", "memory", "added", "fits", "why"),
                    rows=tuple(_row(one, learned.get(one.method.name)) for one in shown),
                ),
                Table(
                    title="memory per rank, by what it is for",
                    columns=("method", *_CAUSES),
                    rows=tuple(
                        (one.method.name, *(human_bytes(one.memory_bytes[key]) for key in _CAUSES))
                        for one in shown
                    ),
                    right=" rrrrrrr",
                ),
            ),
            data=[
                {
                    "method": one.method.name,
                    "trained": one.trained,
                    "share": one.share,
                    "memory_bytes": one.memory_bytes,
                    "added_share": one.added_share,
                    "fits": one.fits,
                    "reason": one.reason,
                    "gain": learned.get(one.method.name),
                }
                for one in shown
            ],
        )


def _row(one: PeftOption, gain: float | None) -> tuple[str, ...]:
    return (
        one.method.name,
        f"{one.trained / 1e6:.2f} M",
        f"{100 * one.share:.3f} %",
        human_bytes(one.peak_bytes),
        f"{100 * one.added_share:.2f} %",
        "yes" if one.fits else "no",
        one.reason + ("" if gain is None else f"; {gain:+.3f} nats in 50 steps"),
    )


def _searched(directory: Path, judged: list[PeftOption], job: TrainJob) -> Explanation:
    """How far each candidate came that is within what was asked for.

    Raises:
        PlanError: none is.
    """
    from shoal.train.peft.probe import search

    within = {str(one.method): one for one in judged if one.fits}
    if not within:
        raise PlanError(
            f"explain.peft: none of {len(judged)} candidates fits: {judged[0].reason}; give more "
            "room"
        )
    match = search(
        directory,
        [one.method for one in within.values()],
        seq_len=min(job.seq_len, _SHORT),
        seed=job.seed,
        data=job.data,
    )
    rows = [(one, within[str(one.method)]) for one in match]
    return Explanation(
        blocks=(
            Table(
                title=f"search of {len(rows)} candidates, {len(judged) - len(rows)} left out",
                columns=("method", "targets", "r", "share", "memory", "steps", "nats"),
                rows=tuple(
                    (
                        one.method.name,
                        str(one.method.options["targets"]),
                        str(one.method.options.get("r", "")),
                        f"{100 * advice.share:.3f} %",
                        human_bytes(advice.peak_bytes),
                        str(one.steps),
                        f"{one.gain:+.3f}",
                    )
                    for one, advice in rows
                ),
                right="  rrrrr",
            ),
        ),
        data=[
            {
                "method": one.method.name,
                "options": one.method.options,
                "gain": one.gain,
                "steps": one.steps,
                "share": advice.share,
                "memory_bytes": advice.memory_bytes,
            }
            for one, advice in rows
        ],
    )
