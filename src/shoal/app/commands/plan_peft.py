"""``shoal plan peft``: which fine-tuning method fits?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.plan.peft import Advice

__all__ = ["peft"]


def peft(
    model: Annotated[str, typer.Argument(help="A model's name or directory, or a job in YAML.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 1xH100, or a file.")
    ] = "local",
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Training tokens, such as 20M.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Memory of a device, in bytes, such as 24G.")
    ] = None,
    must_merge: Annotated[
        bool, typer.Option("--must-merge", help="Serving may cost no more than the model.")
    ] = False,
    tenants: Annotated[int, typer.Option(help="Adapters served on one base.", min=1)] = 1,
    top: Annotated[int, typer.Option(help="Methods to show.")] = 10,
    probe: Annotated[
        Path | None,
        typer.Option(help="Train the first three for fifty steps on this model directory."),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Most parameters trained, as a share such as 0.03.")
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(
            help="Seek method, place and rank by short trainings on this model directory; the "
            "better half goes on each time."
        ),
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Rank the fine-tuning methods for a model on a machine.

    **Examples**

        shoal plan peft Qwen3-14B --machine 1xH100 --tokens 20M

        shoal plan peft Llama-3-8B -m 1xRTX-4090 --must-merge

        shoal plan peft Llama-3-8B -m 1xH100 --tenants 16 -o json

        shoal plan peft runs/base/export --search runs/base/export --share 0.03
    """
    from shoal.app.counts import count
    from shoal.app.show import as_json, table
    from shoal.core.config import resolve
    from shoal.core.sizes import human_bytes
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.peft import advise

    file = Path(model) if model.endswith((".yaml", ".yml")) else None
    flags: dict[str, object] = {
        "model": None if file else model,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "tokens": count(tokens) if tokens else None,
    }
    job = resolve(TrainJob, file=file, flags=flags).value
    asked = functools.partial(
        advise,
        job,
        load(machine),
        budget_bytes=count(budget) if budget else None,
        must_merge=must_merge,
        tenants=tenants,
        share=share,
    )
    if search is not None:
        _search(asked, search, job, output)
        return
    found = asked()
    learned: dict[str, float] = {}
    if probe is not None:
        from shoal.train.peft.probe import probe as train

        first = [one.method for one in found if one.fits][:3]
        length = min(job.seq_len, 128)
        learned = train(probe, first, seq_len=length, seed=job.seed, data=job.data)
        found.sort(key=lambda one: (not one.fits, -learned.get(one.method.name, -1e9)))
    if output is Format.json:
        as_json(
            [
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
                for one in found[:top]
            ]
        )
        return
    table(
        f"fine-tuning of {job.model}",
        ("method", "trains", "share", "memory", "added", "fits", "why"),
        [
            (
                one.method.name,
                f"{one.trained / 1e6:.2f} M",
                f"{100 * one.share:.3f} %",
                f"{one.peak_bytes / 2**30:.2f} GiB",
                f"{100 * one.added_share:.2f} %",
                "yes" if one.fits else "no",
                one.reason
                + (
                    f"; {learned[one.method.name]:+.3f} nats in 50 steps"
                    if one.method.name in learned
                    else ""
                ),
            )
            for one in found[:top]
        ],
    )
    arenas = ("base", "adapter", "gradients", "optimizer", "activations")
    table(
        "memory of a rank, by what it is for",
        ("method", *arenas, "logits", "runtime"),
        [
            (
                one.method.name,
                *(human_bytes(one.memory_bytes[key]) for key in (*arenas, "logits", "runtime")),
            )
            for one in found[:top]
        ],
        numeric=" rrrrrrr",
    )


def _search(
    asked: Callable[..., list[Advice]], directory: Path, job: TrainJob, output: Format
) -> None:
    """Print how far each candidate came that is within what was asked for.

    Raises:
        PlanError: none is.
    """
    from shoal.app.show import as_json, table
    from shoal.core.errors import PlanError
    from shoal.train.peft.probe import candidates, search

    judged = asked(methods=candidates())
    within = {str(one.method): one for one in judged if one.fits}
    if not within:
        raise PlanError(
            f"plan.peft: none of {len(judged)} candidates fits: {judged[0].reason}; give more room"
        )
    found = search(
        directory,
        [one.method for one in within.values()],
        seq_len=min(job.seq_len, 128),
        seed=job.seed,
        data=job.data,
    )
    rows = [(one, within[str(one.method)]) for one in found]
    if output is Format.json:
        as_json(
            [
                {
                    "method": one.method.name,
                    "options": one.method.options,
                    "gain": one.gain,
                    "steps": one.steps,
                    "share": advice.share,
                    "memory_bytes": advice.memory_bytes,
                }
                for one, advice in rows
            ]
        )
        return
    table(
        f"search of {len(rows)} candidates, {len(judged) - len(rows)} left out",
        ("method", "targets", "r", "share", "memory", "steps", "nats"),
        [
            (
                one.method.name,
                one.method.options["targets"],
                str(one.method.options.get("r", "")),
                f"{100 * advice.share:.3f} %",
                f"{advice.peak_bytes / 2**30:.2f} GiB",
                str(one.steps),
                f"{one.gain:+.3f}",
            )
            for one, advice in rows
        ],
        numeric="  rrrrr",
    )
