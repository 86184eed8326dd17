"""A training run from a plan to a report.

The plan is written before the first step, the ranks are started and watched, the
trained model is exported, and what was predicted is put beside what was measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint.branches import begin_branch
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ConfigError, RankError, StoreError, require
from shoal.core.files import write_atomic, write_json
from shoal.core.folder import BESIDE_TOKENIZER
from shoal.core.meter import EventTail
from shoal.core.parts import Choice, table
from shoal.corpora import heldout
from shoal.corpora.protocols import ChatSource
from shoal.corpora.tokenizer import locate
from shoal.corpora.tokens import prepare
from shoal.cost.score import Score
from shoal.cost.shapes import resolve as resolve_shape
from shoal.ir import Machine, TrainJob, TrainPlan, TrainReport
from shoal.parallel.legal import check_split
from shoal.plan.saved import check_device
from shoal.train.device import computes_on
from shoal.train.layout import RunDir
from shoal.train.memory import EmulatedHosts, MemoryLevel, check_memory
from shoal.train.nodes import tokens_of
from shoal.train.peft.job import check_base, export
from shoal.train.planning import plan_job
from shoal.train.report import make_report, report_of_ended, write_page
from shoal.train.run_lock import alone
from shoal.train.start import begin_at
from shoal.train.supervise import Supervisor

Watch = Callable[[dict[str, Any]], None]
"""Called with every event of a run as it happens."""


def train(
    job: TrainJob,
    run_dir: Path,
    ranks: int | None = None,
    *,
    machine: Machine | None = None,
    resume: bool = False,
    restarts: int = 0,
    watch: Watch | None = None,
    anyway: bool = False,
) -> TrainReport:
    """Plan ``job`` for ``ranks`` data-parallel ranks on this machine and run it.

    Args:
        job: what to train; a model of the Hugging Face hub is fetched.
        run_dir: directory of the run, made here.
        ranks: data-parallel ranks; the job's own if not given.
        machine: what to plan for; the saved probe of this machine if not given.
        resume: continue the run that lies in ``run_dir``.
        restarts: how often a lost rank may restart the run from its last checkpoint.
        watch: called with every event.
        anyway: run on this host's CPU what is planned for GPUs; nothing of it is scored.

    Raises:
        ShoalError: the run cannot start, or a rank failed.
    """
    from shoal.core.hub import fetched
    from shoal.machine.described import load

    job = fetched(job)
    if ranks is not None:
        # What the job leaves open stays open for the planner.
        changed = job.model_dump(mode="json", exclude_unset=True)
        changed["parallel"] = {"dp": ranks, "tp": 1, "pp": 1}
        job = TrainJob.model_validate(changed)
    plan = plan_job(job, machine or load("local"))
    return execute(plan, run_dir, resume=resume, restarts=restarts, watch=watch, anyway=anyway)


@alone
def execute(
    plan: TrainPlan,
    run_dir: Path,
    *,
    resume: bool = False,
    from_step: int | None = None,
    start: str | None = None,
    restarts: int = 0,
    watch: Watch | None = None,
    inject: Callable[[Supervisor, dict[str, Any]], None] | None = None,
    hosts: EmulatedHosts | None = None,
    anyway: bool = False,
) -> TrainReport:
    """Run a plan on this host.

    Args:
        plan: what to run.
        run_dir: directory of the run.
        resume: continue from the newest checkpoint; of a run that has done every step, nothing
            is done again and the report is the one it left.
        from_step: continue from this checkpoint instead, in a branch of its own, see
            :mod:`shoal.checkpoint.branches`.
        start: begin from this checkpoint of another run, of any format and split: a path, or
            ``FORMAT:PATH``.
        restarts: how often a lost rank may restart the run.
        watch: called with every event.
        inject: called with the supervisor and every event, to break something on purpose.
        hosts: emulated hosts on which the ranks run, each with a network of its own.
        anyway: run on this host's CPU what was planned for GPUs; nothing of it is scored.

    Raises:
        KeyboardInterrupt: the run was stopped by a signal; its ranks have saved, and the report of
            what they did is in the directory.
        ShoalError: the run cannot start, or a rank failed.
    """
    directory = RunDir(run_dir)
    if resume and from_step is None and (before := finished(plan, directory, watch)) is not None:
        return before
    resume = resume or from_step is not None
    prepare_run(plan, directory, resume=resume, watch=watch, start=start, anyway=anyway)
    job = plan.job
    if from_step is not None:
        begin_branch(directory.root, directory.places_of(job), from_step)
    threads = threads_of(job)
    with MemoryLevel(job, directory, watch, hosts) as level:
        while True:
            supervisor = Supervisor(
                directory,
                ranks=job.parallel.world,
                threads=threads,
                timeout_s=job.timeout_s,
                resume=resume,
                level=level.fleet,
                environment=None if hosts is None else hosts.environment,
                prefix=(lambda rank: ()) if hosts is None else hosts.prefix,
            )
            tail = EventTail(directory.events)

            def tick(tail: EventTail = tail, supervisor: Supervisor = supervisor) -> None:
                for event in tail:
                    if watch is not None:
                        watch(event)
                    if inject is not None:
                        inject(supervisor, event)

            supervisor.start()
            try:
                supervisor.wait(tick)
                break
            except KeyboardInterrupt:
                if supervisor.saved:
                    conclude_stopped(plan, directory)
                raise
            except RankError as error:
                level.recover()
                if restarts <= 0 or supervisor.stopping:
                    level.to_disk()
                    raise
                restarts -= 1
                resume = True
                if watch is not None:
                    watch({"kind": "restart", "message": str(error)})
    return conclude(plan, directory)


def finished(plan: TrainPlan, directory: RunDir, watch: Watch | None) -> TrainReport | None:
    """The report of a run without a step left to do, which an event says; None otherwise."""
    report = report_of_ended(plan, directory)
    if report is not None and watch is not None:
        watch({"kind": "finished", "step": int(report.measured["steps"])})
    return report


def threads_of(job: TrainJob) -> int:
    """Threads of each rank of a job that runs on this host."""
    return job.threads or max(1, (os.cpu_count() or 1) // job.parallel.world)


def prepare_run(
    plan: TrainPlan,
    directory: RunDir,
    *,
    resume: bool,
    watch: Watch | None = None,
    start: str | None = None,
    anyway: bool = False,
) -> None:
    """Tokenise, check that there is enough text, and write the plan.

    Args:
        plan: what will run.
        directory: of the run.
        resume: the run may lie there already.
        watch: called with progress.
        start: a checkpoint of another run, from which this one begins.
        anyway: the plan may be for GPUs that this host does not have.

    Raises:
        ShoalError: the run cannot start; nothing of it was written.
    """
    job = plan.job
    check_device(plan.machine, computes_on(plan.machine), f"the plan of {job.name}", anyway=anyway)
    if directory.plan.exists() and not resume:
        raise ConfigError(
            f"{directory.root}: already contains a run; continue it with --resume, "
            "or choose another name with --set name=..."
        )
    shape = resolve_shape(job.model)
    require(
        job.seq_len <= shape.max_position,
        "seq_len",
        job.seq_len,
        expected=f"at most {shape.max_position}, the longest position of {job.model}",
    )
    check_split(job, shape)
    check_base(job)
    check_memory(job)
    if not resume:
        _check_free(directory.levels_of(job))
    # The last token of a masked-diffusion model is its mask, which no text has.
    vocab = shape.vocab_size - (shape.family == "mdlm" and job.tokenizer == "bpe")
    tokenizer = job.tokenizer
    if tokenizer == "bpe" and Path(job.model, "tokenizer.json").is_file():
        # A model that is trained on goes on with the tokenizer it knows.
        tokenizer = str(Path(job.model, "tokenizer.json"))

    def progress(*state: Any) -> None:
        if watch is not None:
            watch({"kind": "prepare", "state": state})

    tokens = prepare(job.data, tokenizer, vocab, progress=progress)
    heldout.check(
        tokens,
        table("packing").build(job.packing),
        seq_len=job.seq_len,
        global_batch=job.global_batch,
    )
    if start is not None:
        begin_at(directory.root, start)
    # Registered before anything lies there, so that a run can be seen while it runs.
    Score().register(directory.root, "train", job.name, job.model)
    write_atomic(directory.tokenizer, tokens.tokenizer_path.read_bytes())
    _keep_beside_tokenizer(directory, job.data, tokenizer)
    write_json(directory.tokens, {"path": str(tokens.path.absolute())})
    if directory.plan.exists():
        if TrainPlan.load(directory.plan) == plan:
            return
        past = directory.past_plan(len(directory.past_plans()))
        write_atomic(past, directory.plan.read_bytes())
    # Written before anything is measured: a prediction made afterwards is none.
    plan.save(directory.plan, header="The plan of the run, with its prediction.")


def _keep_beside_tokenizer(directory: RunDir, data: Choice, tokenizer: str) -> None:
    """Keep what says how the tokenizer is used, for the export: its settings, the chat template."""
    folder = None if tokenizer == "bpe" else locate(Path(tokenizer)).parent
    for name in BESIDE_TOKENIZER:
        if folder is not None and (folder / name).is_file():
            write_atomic(directory.tokenizer.with_name(name), (folder / name).read_bytes())
    corpus = table("corpus").build(data, where="data")
    if isinstance(corpus, ChatSource):
        # Whatever rendered the chats: that of the model, another, or the default.
        source = corpus.with_model(folder).chat_template().source
        write_atomic(directory.tokenizer.with_name("chat_template.jinja"), source)


def _check_free(places: Sequence[Path | str]) -> None:
    """Refuse to begin a run where another one has saved: what goes on would take its state."""
    for place in places:
        try:
            steps = Store(place).steps()
        except (OSError, CheckpointError):
            continue  # a save there reports it
        if steps:
            raise ConfigError(
                f"{place}: holds checkpoints of another run, the newest of step {steps[-1]}; give "
                "this run another checkpoint.path or level, continue that run with --resume, or "
                "begin from its checkpoint elsewhere with --from"
            )


def conclude(plan: TrainPlan, directory: RunDir) -> TrainReport:
    """Export the trained model, write the report and add it to the score."""
    from shoal.checkpoint.convert import export as export_model
    from shoal.checkpoint.levels import newest
    from shoal.corpora.tokens import open_tokens

    report = make_report(plan, directory)
    if report.measured["finished"]:
        shutil.rmtree(directory.export, ignore_errors=True)
        if plan.job.finetune is not None:
            export(plan.job, directory, directory.tokenizer)
        else:
            saved = newest([Store(place) for place in directory.levels_of(plan.job)])
            export_model(saved, directory.export, tokenizer=directory.tokenizer)
    if "bits_per_byte" in report.measured:
        tokens = open_tokens(tokens_of(directory))
        report.measured["gzip_bits_per_byte"] = heldout.gzip_bits_per_byte(tokens)
        report.measured["xz_bits_per_byte"] = heldout.xz_bits_per_byte(tokens)
    write_json(directory.report, report.model_dump(mode="json"))
    write_page(report, directory)
    Score().append(report, directory.root)
    return report


def conclude_stopped(plan: TrainPlan, directory: RunDir) -> None:
    """Write the report of a run that was stopped, unless that was before its first step."""
    with contextlib.suppress(StoreError):
        conclude(plan, directory)
