"""``shoal train``: run a training job here, or write what starts it elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.commands.jobs import continuable, show_prepared, show_report
from shoal.app.show import Format, Output, Quiet, show_notes

if TYPE_CHECKING:
    from shoal.ir import TrainJob, TrainPlan

EXAMPLES = """
**Examples**

    shoal train --minutes 3 --ranks 2             # a small model on real text

    shoal train --data notes/ --model shoal-1m    # your own text

    shoal train --model DIR --finetune lora --data chats.jsonl    # rows with messages

    shoal train --model ORG/NAME --data hf://datasets/ORG/NAME    # from the Hugging Face hub

    shoal train job.yaml --set optimizer=muon     # your own job

    shoal train --plan plan.yaml                  # what `shoal plan train --out` wrote

    shoal train --dir runs/run --resume           # resume

    shoal train --from universal:DIR --mesh tp=2 --dir runs/other    # with other parallelism

    shoal train job.yaml --robust --spares 1      # fault tolerance

    shoal train job.yaml --ranks 8 --robust --hang-s 60 --locator c4d


    shoal train diagnose runs/run                 # find slow and hanging ranks

    shoal train --ranks 4 --set checkpoint.memory=xor --restarts 9 --chaos kill-node:50

    shoal train job.yaml --launch slurm           # write launch files for a cluster

    shoal train job.yaml --launch ray             # run it on the Ray cluster at $RAY_ADDRESS

    torchrun --nproc-per-node 2 -m shoal train job.yaml --ranks 2
"""


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A model's name or directory, or a job in YAML. [default: the defaults of a job]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model's name for random weights, or a Hugging Face directory or ORG/NAME of "
            "the hub to continue from."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text or chats: a file or directory of text, JSONL or Parquet, or "
            "hf://datasets/ORG/NAME."
        ),
    ] = None,
    finetune: Annotated[str | None, typer.Option(help="Fine-tuning method, such as lora.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, and of its directory below runs/.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the optimizer.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Data-parallel ranks to start.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run a plan instead of a job.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the run. [default: runs/NAME]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --dir.")] = False,
    from_step: Annotated[
        int | None, typer.Option(help="Resume from this step. [default: the newest]")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from a checkpoint of another run, in any format and parallelism: a "
            "directory, universal:DIR, or an address such as s3://bucket/run.",
        ),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Ranks along each axis, such as dp=1,tp=2.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Length of the run in minutes, by the predicted step time.")
    ] = None,
    machine: Annotated[
        str,
        typer.Option(
            "--machine",
            "-m",
            help="Machine to plan for; with --plan, the machine that the plan must be for.",
        ),
    ] = "local",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="path=value, over everything else.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="Maximum number of automatic restarts after lost ranks.")
    ] = 0,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Detect faults, exclude failed ranks and continue from the last checkpoint.",
        ),
    ] = False,
    spares: Annotated[int, typer.Option(help="With --robust: number of spare places.")] = 0,
    min_ranks: Annotated[
        int,
        typer.Option(
            help="With --robust: minimum number of replicas to continue with; 0 for no reduction."
        ),
    ] = 1,
    hang_s: Annotated[
        float, typer.Option(help="With --robust: seconds without progress that count as a hang.")
    ] = 30.0,
    locator: Annotated[
        str, typer.Option(help="With --robust: method to locate hanging and slow ranks.")
    ] = "megascale",
    chaos: Annotated[
        str | None,
        typer.Option(
            help="Fault injection: kill-rank:STEPS or kill-node:STEPS, with :COUNT for a limit."
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="Write launch files for torchrun, slurm or kubernetes, or run on ray."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the configuration and the plan without running.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a job, for editors.")
    ] = False,
    quiet: Quiet = False,
    output: Output = Format.text,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Run a plan for GPUs on this CPU (not scored).")
    ] = False,
) -> None:
    """Plan and train a model on one or many ranks, and report prediction and measurement."""
    from shoal.api.preparing import prepare
    from shoal.api.training import TrainOptions, starter_of, train_prepared, write_launch
    from shoal.app.show import TrainingBar, as_json, say_if_slower
    from shoal.core.extras import require_extra
    from shoal.ir import TrainJob, TrainPlan

    if schema:
        as_json(TrainJob.model_json_schema())
        return
    if launch is None and not dry_run:
        require_extra("torch", purpose="shoal train")
    found = {"spares": spares, "min_ranks": min_ranks, "hang_s": hang_s, "locator": locator}
    options = TrainOptions(
        resume=resume,
        from_step=from_step,
        start=start,
        restarts=restarts,
        robust=found if robust else None,
        chaos=chaos,
        launcher=launch,
        anyway=anyway,
    )
    # What only writes or shows a plan needs no weights.
    written = launch if starter_of(launch) is None else None
    later = dry_run or written is not None
    going_on = resume or from_step is not None
    ready = prepare(
        config,
        kind="train",
        plan=plan,
        machine=machine,
        directory=directory,
        resume=going_on,
        start=start,
        fetch=not later,
        # Under torchrun a plan runs where its launch files were sent to.
        here=not later and "TORCHELASTIC_RUN_ID" not in os.environ,
        anyway=anyway,
        command="train",
        sets=set_ or [],
        environment=os.environ,
        model=model,
        data=data,
        finetune=finetune,
        name=name,
        lr=lr,
        seq_len=seq_len,
        ranks=ranks,
        steps=steps,
        minutes=minutes,
        **_mesh(mesh),
    )
    first = os.environ.get("RANK", "0") == "0"
    show_notes(ready.notes)
    if written is not None:
        for file in write_launch(ready, written):
            typer.echo(f"wrote {file}")
        return
    if dry_run:
        show_prepared(ready, output)
        return
    assert isinstance(ready.plan, TrainPlan)
    if first and not (resume and from_step is None and _is_finished(ready.plan, ready.directory)):
        _print_weights_source(ready.plan.job, ready.directory if going_on else start)
    say_if_slower()
    more = "" if launch is None else f" --launch {launch}"
    with (
        continuable("train", ready.directory, more),
        TrainingBar(quiet=quiet or not first) as bar,
    ):
        report = train_prepared(ready, options, watch=bar)
    if report is not None:
        show_report(report, ready.directory, output)


def _is_finished(plan: TrainPlan, directory: Path) -> bool:
    """Whether no step is left of the run in a directory."""
    from shoal.train.layout import RunDir
    from shoal.train.report import report_of_ended

    return report_of_ended(plan, RunDir(directory)) is not None


def _print_weights_source(job: TrainJob, saved: Path | str | None) -> None:
    """Print where the weights that are trained come from."""
    from shoal.train.build import weights_source

    words = weights_source(job)
    if saved is not None:
        words = f"weights: from checkpoint {saved}"
    typer.echo(words, err=True)


def diagnose(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    locator: Annotated[
        list[str] | None, typer.Option(help="Methods. [default: c4d, megascale]")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Say who was slow and who hung; write a heat map and a trace for Perfetto.

    **Examples**

        shoal train diagnose runs/run

        shoal train diagnose runs/run --locator c4d -o json
    """
    from shoal.app.show import as_json
    from shoal.train.layout import RunDir
    from shoal.train.watch.diagnose import diagnose as ask

    result = ask(RunDir(run).ranks, tuple(locator or ("c4d", "megascale")))
    if output is Format.json:
        as_json(result)
        return
    typer.echo(result["text"])
    if "driver" in result:
        typer.echo(f"last diagnosis of the driver: {result['driver']['message']}")
    for file in result["files"]:
        typer.echo(f"wrote {file}")


def _mesh(text: str | None) -> dict[str, int]:
    """The settings that ``--mesh`` stands for."""
    if text is None:
        return {}
    from shoal.checkpoint.universal.protocols import RankLayout

    return {f"parallel.{axis}": size for axis, size in RankLayout.parse(text)}


train.__doc__ = f"{train.__doc__}\n{EXAMPLES}"
