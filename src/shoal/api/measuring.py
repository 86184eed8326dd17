"""Kernels, attention, ways to decode and an engine's settings, measured beside each other here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shoal.api.loading import model_directory
from shoal.api.probing import silent
from shoal.core.config import parse, resolve
from shoal.core.errors import require
from shoal.core.hub import fetched
from shoal.core.measure import num_cores
from shoal.core.parts import load_object
from shoal.cost.workloads.choose import choose
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from shoal.claims.bench.attention.values import AttentionReport
    from shoal.claims.bench.decode_methods import DecodeComparison
    from shoal.claims.bench.kernels import KernelBenchRow
    from shoal.plan.tune.protocols import Setting
    from shoal.plan.tune.serving import EngineTuning, Goal

# Called with (what is done, done, total).
NamedProgress = Callable[[str, float, float], None]

# Engine -> what gives its knobs, and loads it with its workload.
TUNED_ENGINES = {
    "shoal": "shoal.serve.bench.tune:shoal_engine",
    "transformers": "shoal.claims.bench.serving.generate:transformers_engine",
}
# What is compared on the mini-model if nothing is named.
_TRAINED = ("medusa", "falcon", "ppd")


def bench_attention(
    *,
    kernels: str | Sequence[str] = "all",
    masks: str | Sequence[str] = "all",
    methods: str | Sequence[str] = "all",
    lengths: Sequence[int] | None = None,
    context_lengths: Sequence[int] | None = None,
    quick: bool = False,
    progress: NamedProgress = silent,
    **settings: Any,
) -> AttentionReport:
    """Compare attention kernels and context-parallel methods under many masks.

    Every cell is compared with float64 before it is timed.

    Args:
        kernels: parts of kind ``attention_kernel``, or ``all`` or ``none``.
        masks: names of patterns, or ``all``.
        methods: parts of kind ``context``, or ``all`` or ``none``.
        lengths: tokens of a sequence; 1024 and 2048 if None, 256 if quick.
        context_lengths: the same of the context-parallel methods; the shortest length if None.
        quick: one round on one thread, without flex unless it is named.
        progress: called with (what is done, done, total).
        **settings: other fields of
            :class:`~shoal.claims.bench.attention.values.AttentionSettings`.

    Raises:
        ConfigError: a name or a number that cannot be.

    Examples:
        >>> report = shoal.bench_attention(kernels=["sdpa", "tiled"], methods="none", quick=True)
        >>> report.counts()
    """
    from shoal.claims.bench.attention.harness import chosen, run
    from shoal.claims.bench.attention.values import AttentionSettings

    names = chosen(kernels, "attention_kernel")
    sizes = list(lengths or ((256,) if quick else (1024, 2048)))
    raw = {
        **settings,
        "kernels": [name for name in names if not (quick and name == "flex" and kernels == "all")],
        "masks": chosen(masks, "mask"),
        "methods": chosen(methods, "context"),
        "lengths": sizes,
        "context_lengths": [min(sizes)] if context_lengths is None else list(context_lengths),
        **({"repeats": 1, "threads": 1} if quick else {}),
    }
    return run(parse(AttentionSettings, raw, where=""), progress=progress)


def bench_kernels(
    ops: Sequence[str] = (),
    *,
    quick: bool = False,
    progress: NamedProgress = silent,
    on_ready: Callable[[], None] = silent,
    **options: Any,
) -> list[KernelBenchRow]:
    """Time every kernel beside its peers, and beside the roofline of the probed machine.

    Args:
        ops: operators, such as ``linear``; all of them if empty.
        quick: three rounds over a quarter of the memory.
        progress: called with (what is done, done, total).
        on_ready: called before anything is timed.
        **options: other fields of :class:`~shoal.claims.bench.kernels.KernelBenchOptions`.

    Raises:
        ConfigError: an operator, a format or a backend that there is not.

    Examples:
        >>> rows = shoal.bench_kernels(["linear"], rows=(1, 16), shapes=((4096, 4096),))
        >>> rows[0].backend, rows[0].seconds
    """
    from shoal.claims.bench.kernels import KernelBenchOptions, bench

    dtype = options.get("dtype", "bf16")
    require(dtype in ("fp32", "bf16"), "--dtype", dtype, expected="fp32 or bf16")
    if quick:
        options |= {"pairs": 3, "rotated_bytes": 160 * 2**20}
    asked = KernelBenchOptions(ops=tuple(ops), **options)
    on_ready()
    return bench(asked, progress=progress)


def bench_decode(
    model: str | PathLike[str] = "",
    *,
    methods: Sequence[str] = (),
    drafters: Mapping[str, str | PathLike[str]] | None = None,
    also: Mapping[str, str | PathLike[str]] | None = None,
    batches: Sequence[int] = (1,),
    prompts: int = 24,
    prompt_tokens: int = 64,
    new_tokens: int = 96,
    rounds: int = 3,
    precision: str = "bf16",
    threads: int = 0,
    keep: bool = True,
    say: Callable[[str], None] = silent,
    on_ready: Callable[[], None] = silent,
) -> DecodeComparison:
    """Compare ways to decode several tokens a step with plain decoding.

    All answer the same held-out prompts with the same weights, in turn. Drafters that are not there
    are trained first, which is not timed.

    Args:
        model: directory of the target, or an id of the hub; the mini-model of the zoo if empty.
        methods: parts of kind ``speculative``; n-grams, those of ``drafters``, and for the
            mini-model those that are trained for it, if empty.
        drafters: method -> directory of a drafter.
        also: diffusion, parscale, duo or ladder -> directory of such a model.
        batches: requests at once.
        prompts: held-out prompts.
        prompt_tokens: tokens of each.
        new_tokens: tokens of an answer.
        rounds: timed rounds.
        precision: bf16 or fp32.
        threads: that compute; 0 for all cores.
        keep: save the table where plans find it.
        say: receives what is trained.
        on_ready: called when all is there, before anything is timed.

    Raises:
        ConfigError: a method or a model that there is not.

    Examples:
        >>> found = shoal.bench_decode(methods=["ngram", "medusa"], batches=(1, 4))
        >>> [(row.method, row.speedup) for row in found.rows]
    """
    from shoal.claims.bench.decode import PLAIN, Bench, compared, held_out_prompts, lively
    from shoal.claims.bench.decode_methods import DecodeComparison, check_own, keep_rows
    from shoal.train import zoo
    from shoal.train.zoo.drafters import method_of

    sizes = sorted(set(batches))
    given = {name: Path(directory) for name, directory in (drafters or {}).items()}
    others = {name: Path(directory) for name, directory in (also or {}).items()}
    for name, directory in others.items():
        check_own(name, directory)
    target = model_directory(model) if model else zoo.trained("shoal-27m", say)
    wanted = methods or ["ngram", *(_TRAINED if not model else ()), *given]
    parts = {name: method_of(name, target, given, say) for name in dict.fromkeys([*wanted, *given])}
    data = None if model else zoo.corpus("shoal-27m")
    # A fifth may go: answers that repeat themselves.
    count = max(prompts, max(sizes) * 5 // 4)
    request = held_out_prompts(target, data, count, prompt_tokens)
    own = {
        name: (directory, held_out_prompts(directory, data, count, prompt_tokens))
        for name, directory in others.items()
    }
    on_ready()
    bench = Bench(
        target,
        {PLAIN: None, **parts},
        precision=precision,
        threads=threads or num_cores(),
        max_running=max(sizes),
        kv_tokens=max(8192, max(sizes) * (prompt_tokens + new_tokens + 64)),
        own=own,
    )
    kept = lively(bench, request, new_tokens)
    loops = len(request) - len(kept)
    rows = [
        row
        for size in sizes
        for row in compared(bench, kept, new_tokens, rounds=rounds, batch=size, loops=loops)
    ]
    place = keep_rows(rows, target, str(model) or "shoal-27m", precision) if keep else None
    title = f"decode: {target.name}, answers of {new_tokens} tokens, {precision}"
    return DecodeComparison(title=title, rows=tuple(rows), own=tuple(others), saved=place)


def bench_tune(
    model: str | PathLike[str] = "shoal-4m",
    *,
    trace: str | PathLike[str] | None = None,
    requests: int | None = None,
    budget_s: float = 300.0,
    goal: str = "throughput",
    engine: str = "shoal",
    knobs: Mapping[str, Sequence[Setting]] | None = None,
    tuner: str = "bayes",
    trials: int = 64,
    width: float = 0.05,
    limit_s: float = 60.0,
    warm: str | PathLike[str] | None = None,
    sets: Sequence[str] = (),
    seed: int = 0,
    progress: Callable[[float, float, str], None] | None = None,
    on_ready: Callable[[], None] = silent,
) -> EngineTuning:
    """Tune the settings of a serving engine by really serving a workload with them.

    Args:
        model: directory, id of the hub, or model of the zoo.
        trace: your own requests, as JSON lines; chat if None.
        requests: the first so many of them.
        budget_s: seconds of the search.
        goal: throughput, latency or ttft.
        engine: shoal, or transformers (its ``generate``).
        knobs: knob -> values to try, beside or instead of the usual ones.
        tuner: part that searches: bayes, random, halving or exhaustive.
        trials: most configurations.
        width: a trial is repeated until the relative error of its mean is below this.
        limit_s: seconds of one measurement.
        warm: a study of another machine, whose best configurations are tried first.
        sets: ``path=value`` texts over the job's settings.
        seed: of the search.
        progress: called with (done, total, what is done).
        on_ready: called when all is there, before anything is measured.

    Raises:
        ConfigError: a goal, an engine or a knob that there is not.
        PlanError: every trial failed.

    Examples:
        >>> tuned = shoal.bench_tune("shoal-4m", knobs={"max_running": (4, 8)}, budget_s=90)
        >>> tuned.result.best.config, tuned.best_job().max_running
    """
    from shoal.plan.tune import TUNERS
    from shoal.plan.tune.protocols import TuningResult
    from shoal.plan.tune.repeats import Repeats
    from shoal.plan.tune.serving import GOALS, EngineTuning, ServingObjective, tune_serving

    require(goal in GOALS, "--goal", goal, expected=f"one of {', '.join(GOALS)}")
    elsewhere = TuningResult.load(Path(warm)).trials if warm is not None else ()
    chosen = choose(None, None if trace is None else str(trace))
    flags = {"model": str(model), "workload": chosen and chosen.model_dump(mode="json")}
    job = fetched(resolve(ServeJob, flags=flags, sets=sets).value)
    known = ", ".join(TUNED_ENGINES)
    require(engine in TUNED_ENGINES, "--engine", engine, expected=f"one of {known}")
    space, load = load_object(TUNED_ENGINES[engine])(job, knobs or {})
    options = {"starts": min(16, max(4, space.size // 10))} if tuner == "bayes" else {}
    searcher = TUNERS.build({"name": tuner, **options}, where="--tuner")
    repeats = Repeats(width=width)
    runner, workload = load(requests)
    with contextlib.closing(runner):
        on_ready()
        objective = ServingObjective(
            runner=runner,
            workload=workload,
            goal=cast("Goal", goal),
            repeats=repeats,
            limit_s=limit_s,
            until=time.monotonic() + budget_s,
        )
        result = tune_serving(
            searcher,
            space,
            objective,
            trials,
            name=tuner,
            seed=seed,
            elsewhere=elsewhere,
            progress=progress,
        )
    return EngineTuning(job=job, engine=engine, goal=cast("Goal", goal), result=result)
