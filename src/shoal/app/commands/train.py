"""``shoal train``: run a training job here, or write what starts it elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.commands.jobs import continuable, same_kind, show_report
from shoal.app.show import Format, Output, Quiet, say_if_slower

if TYPE_CHECKING:
    from shoal.core.config import ResolvedValue
    from shoal.ir import TrainJob, TrainPlan
    from shoal.train.chaos import Chaos
    from shoal.train.protocols import Starter

__all__ = ["diagnose", "train"]

EXAMPLES = """
**Examples**

    shoal train --minutes 3 --ranks 2             # a small model on real text, here and now

    shoal train --data notes/ --model shoal-1m    # your own text

    shoal train job.yaml --set optimizer=muon     # your own job

    shoal train --plan plan.yaml                  # what `shoal plan train --out` wrote

    shoal train --dir runs/run --resume           # go on where it stopped

    shoal train --from universal:DIR --mesh tp=2 --dir runs/other    # ... in another split

    shoal train job.yaml --robust --spares 1      # find faults, exclude, go on

    shoal train job.yaml --ranks 8 --robust --hang-s 60 --locator c4d


    shoal train diagnose runs/run                 # who was slow, who hung

    shoal train --ranks 4 --set checkpoint.memory=xor --restarts 9 --chaos kill-node:50

    shoal train job.yaml --launch slurm           # write what starts it on a cluster

    shoal train job.yaml --launch ray             # run it on the Ray cluster at $RAY_ADDRESS

    torchrun --nproc-per-node 2 -m shoal train job.yaml --ranks 2
"""


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A job in YAML; without one, the defaults.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model's name, or a Hugging Face directory to go on from.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Your text: a file or directory of text, JSONL or Parquet.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Data-parallel ranks to start.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run this plan instead of a job.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory of the run; runs/NAME by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue that run.")] = False,
    from_step: Annotated[
        int | None, typer.Option(help="Continue from this checkpoint, not from the newest.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Begin where this checkpoint of another run stopped, whatever its format and "
            "split: a directory, universal:DIR, or an address such as s3://bucket/run.",
        ),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Ranks along each axis, such as dp=1,tp=2.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Length by the plan's own estimate.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="What to plan for; with --plan, what it must be made for.")
    ] = "local",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="path=value, over everything else.")
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="Lost ranks after which the run restarts by itself.")
    ] = 0,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Find faults while it runs, exclude what failed, go on from the last checkpoint.",
        ),
    ] = False,
    spares: Annotated[int, typer.Option(help="With --robust: places that stand by.")] = 0,
    min_ranks: Annotated[
        int, typer.Option(help="With --robust: fewest replicas to go on with; 0: never fewer.")
    ] = 1,
    hang_s: Annotated[
        float, typer.Option(help="With --robust: seconds without progress that are a hang.")
    ] = 30.0,
    locator: Annotated[
        str, typer.Option(help="With --robust: who names hanging and slow ranks.")
    ] = "megascale",
    chaos: Annotated[
        str | None,
        typer.Option(
            help="Kill on purpose: kill-rank:STEPS or kill-node:STEPS, and :COUNT for no more."
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="Write launch files for torchrun, slurm or kubernetes; or run on ray."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the configuration and the plan; run nothing.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a job, for editors.")
    ] = False,
    quiet: Quiet = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Run a plan made for GPUs on this CPU; not scored.")
    ] = False,
) -> None:
    """Train a model: plan it, run it over ranks, report prediction beside measurement."""
    from shoal.app.show import TrainingBar, as_json
    from shoal.core.errors import ConfigError
    from shoal.corpora.files import corpus_at
    from shoal.ir import TrainJob, TrainPlan

    if schema:
        as_json(TrainJob.model_json_schema())
        return
    same_kind("train", config, "run")
    chosen: TrainPlan
    resolved: ResolvedValue[TrainJob] | None = None
    if start is not None and (resume or from_step is not None or robust):
        raise ConfigError("--from begins a new run; leave out --resume, --from-step and --robust")
    going_on = resume or from_step is not None
    old = directory / "plan.yaml" if directory is not None and going_on else None
    flags: dict[str, object] = {
        "model": model,
        "data": None if data is None else corpus_at(data),
        "parallel.dp": ranks,
        "steps": steps,
        "minutes": minutes,
        **_mesh(mesh),
    }
    changed = config is not None or bool(set_) or any(v is not None for v in flags.values())
    if plan is not None:
        chosen = _saved(plan, None if launch or dry_run else machine, anyway=anyway)
    elif old is not None and old.exists() and not changed:
        chosen = TrainPlan.load(old)
    else:
        resolved = _resolve(config, old, flags, set_ or [], start)
        chosen = _plan(resolved.value, machine)
    directory = directory or Path("runs") / chosen.job.name
    starter = None if launch is None else _starter(launch)
    if launch is not None and starter is None:
        _write_launch(chosen, launch, directory)
        return
    if dry_run:
        _show(resolved, chosen)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from shoal.train.torchrun import execute_under_torchrun

        with TrainingBar(quiet=quiet or os.environ["RANK"] != "0") as bar:
            result = execute_under_torchrun(
                chosen, directory, resume=resume, start=start, watch=bar, anyway=anyway
            )
        if result is not None:
            show_report(result, directory)
        return
    if starter is not None:
        unknown = {"--robust": robust or None, "--chaos": chaos, "--from-step": from_step}
        for flag, value in unknown.items():
            if value is not None:
                raise ConfigError(f"{flag} with --launch {launch}: leave {flag} out")
        again = continuable("train", directory, f" --launch {launch}")
        with again, TrainingBar(quiet=quiet) as bar:
            report = starter.run(
                chosen, directory, resume=resume, start=start, restarts=restarts, watch=bar
            )
        show_report(report, directory)
        return
    faults = _faults(chaos, chosen, lasting=robust or restarts > 0)
    if robust:
        _run_robust(
            chosen,
            directory,
            machine,
            resume=resume,
            quiet=quiet,
            inject=faults,
            anyway=anyway,
            options={
                "spares": spares,
                "min_ranks": min_ranks,
                "hang_s": hang_s,
                "locator": locator,
            },
        )
        return
    from shoal.train.run import execute

    say_if_slower()
    with continuable("train", directory), TrainingBar(quiet=quiet) as bar:
        report = execute(
            chosen,
            directory,
            resume=resume,
            from_step=from_step,
            start=start,
            restarts=restarts,
            watch=bar,
            inject=faults,
            anyway=anyway,
        )
    show_report(report, directory)


def _run_robust(
    plan: TrainPlan,
    directory: Path,
    machine: str,
    *,
    resume: bool,
    quiet: bool,
    inject: Chaos | None,
    anyway: bool,
    options: dict[str, Any],
) -> None:
    from shoal.app.show import TrainingBar
    from shoal.train.watch.robust import Robust, execute_robust

    with continuable("train", directory), TrainingBar(quiet=quiet) as bar:
        report = execute_robust(
            plan,
            directory,
            Robust(**options),
            resume=resume,
            watch=bar,
            replan=lambda job: _plan(job, machine),
            inject=inject,
            anyway=anyway,
        )
    show_report(report, directory)


def _faults(text: str | None, plan: TrainPlan, *, lasting: bool) -> Chaos | None:
    """What ``--chaos`` asks for.

    Raises:
        ConfigError: it says nothing that can be done, or the first fault would end the run.
    """
    from shoal.checkpoint.inmemory import MEMORY_CODES
    from shoal.core.errors import require
    from shoal.train.chaos import Chaos

    if text is None:
        return None
    require(
        lasting, "--chaos", text, expected="--restarts N or --robust with it, to go on afterwards"
    )
    memory = plan.job.checkpoint.memory
    size = 1 if memory is None else MEMORY_CODES.build(memory).ranks_per_node
    return Chaos(text, ranks_per_node=size, seed=plan.job.seed)


def diagnose(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    locator: Annotated[
        list[str] | None, typer.Option(help="Ask these; c4d and megascale by default.")
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
        typer.echo(f"the driver found last: {result['driver']['message']}")
    for file in result["files"]:
        typer.echo(f"wrote {file}")


def _resolve(
    config: Path | None,
    old: Path | None,
    flags: dict[str, object],
    sets: list[str],
    start: str | None = None,
) -> ResolvedValue[TrainJob]:
    from shoal.core.config import resolve
    from shoal.ir import TrainJob, TrainPlan

    if start is not None and config is None:
        from shoal.train.start import job_of

        first = job_of(start)
        if first is not None:
            # Ranks may be others now, and so may what each does at a time. Where the other run
            # saves is no place for this one.
            own = first.checkpoint.model_copy(update={"path": None, "levels": ()})
            return resolve(
                TrainJob,
                base=first.model_copy(update={"microbatch": None, "checkpoint": own}),
                environment={},
                flags=flags,
                sets=sets,
            )
    if old is not None and config is None and old.exists():
        job = TrainPlan.load(old).job
        again: dict[str, object] = {"microbatch": None}  # ranks may be others now
        if flags["minutes"] is not None:
            again["steps"] = None
        return resolve(
            TrainJob,
            base=job.model_copy(update=again),
            environment={},
            flags=flags,
            sets=sets,
        )
    result = resolve(TrainJob, file=config, flags=flags, sets=sets)
    job = result.value
    if job.steps is None and job.tokens is None and job.minutes is None:
        result = result.replace({"minutes": 3.0}, "default: three minutes")
    return result


def _saved(path: Path, machine: str | None, *, anyway: bool) -> TrainPlan:
    """A plan from a file, if it is for its model and, unless None, for this machine.

    Raises:
        ShoalError: it is not, or cannot run.
    """
    from shoal.core.errors import ConfigError, PlanError
    from shoal.ir import TrainPlan
    from shoal.machine.described import load
    from shoal.machine.probing import saved_path
    from shoal.parallel.legal import check_split
    from shoal.plan.saved import check_machine, check_model, read_plan

    result = read_plan(path)
    if not isinstance(result, TrainPlan):
        kind = result.job.job
        raise ConfigError(
            f"{path}: a plan of the job {kind}; run it with shoal run {kind} --plan {path}, or "
            "give one of shoal plan train"
        )
    check_model(result, str(path))
    try:
        check_split(result.job, result.shape)
    except PlanError as cause:
        raise PlanError(f"{path}: {cause}; correct the file, or plan again") from cause
    # Under torchrun it runs where its launch files were sent to.
    here = None if "TORCHELASTIC_RUN_ID" in os.environ else machine
    if here is not None and (here != "local" or saved_path().exists()):
        target = load(here)
        # Whether its GPUs are here is asked when it starts.
        if not anyway or target.device.kind == result.machine.device.kind:
            check_machine(result, target, str(path))
    from shoal.train.run import with_kernels, with_rounds

    result = with_rounds(with_kernels(result))
    if not result.fits:
        typer.echo(f"note: {path}: {result.why or 'it does not fit, says its planner'}", err=True)
    return result


def _mesh(text: str | None) -> dict[str, object]:
    """The flags that ``--mesh`` stands for."""
    if text is None:
        return {}
    from shoal.checkpoint.universal.protocols import RankLayout

    mesh = RankLayout.parse(text)
    return {f"parallel.{axis}": getattr(mesh, axis) for axis in ("dp", "tp", "pp", "ep")}


def _plan(job: TrainJob, machine: str) -> TrainPlan:
    from shoal.machine.described import load
    from shoal.train.run import plan_job

    return plan_job(job, load(machine))


def _show(resolved: ResolvedValue[TrainJob] | None, plan: TrainPlan) -> None:
    from shoal.app.commands.plan import show_plans
    from shoal.app.show import table

    if resolved is not None:
        table("configuration", ("key", "value", "why"), list(resolved.lines()))
    show_plans([plan])


def _starter(name: str) -> Starter | None:
    """The launcher of that name, if it starts the ranks itself."""
    from shoal.core.parts import table
    from shoal.train.protocols import Starter

    launcher = table("launch").build(name, where="--launch")
    return launcher if isinstance(launcher, Starter) else None


def _write_launch(plan: TrainPlan, name: str, directory: Path) -> None:
    from shoal.core.files import write_atomic
    from shoal.core.parts import table

    files = table("launch").build(name, where="--launch").files(plan)
    plan.save(directory / "plan.yaml")
    for file, text in files.items():
        write_atomic(directory / file, text)
        typer.echo(f"wrote {directory / file}")
    typer.echo(f"wrote {directory / 'plan.yaml'}")


train.__doc__ = f"{train.__doc__}\n{EXAMPLES}"
