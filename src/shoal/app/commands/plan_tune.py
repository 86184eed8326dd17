"""``shoal plan tune``: search the splits of a training job by trials, and explain what mattered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.plan.tune.protocols import Setting

__all__ = ["tune"]


def tune(
    model: Annotated[str, typer.Argument(help="A model's name, or a directory.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="16xFrontier, 16xH100, or a file.")
    ] = "local",
    trials: Annotated[int, typer.Option(help="Configurations to try.")] = 64,
    tuner: Annotated[str, typer.Option(help="bayes, random or exhaustive.")] = "bayes",
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    nodes: Annotated[
        str | None, typer.Option(help="Numbers of nodes to try, such as 12,16; all if not given.")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", help="axis=value[,value...], such as microbatch=1,2,4."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Shapley values: what made the difference.")
    ] = False,
    weak: Annotated[
        str | None, typer.Option(help="Replicas, such as 2,4,6: how well the best one scales.")
    ] = None,
    surrogate: Annotated[str, typer.Option(help="Of --explain: gp or forest.")] = "gp",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    top: Annotated[int, typer.Option(help="Trials to show.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Save all trials as YAML.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Tune split, batches and recomputation of a training job in the simulator.

    What does not fit or is no legal split is a failed trial, which the search learns from. Axes:
    nodes, tp, pp, vpp, microbatch, accumulate, shard, recompute.

    **Examples**

        shoal plan tune "GPT-3 175B" --machine 128xFrontier --trials 64 --explain

        shoal plan tune Llama-3-70B -m 64xH100 --fix recompute=full --fix accumulate=16,32

        shoal plan tune Qwen3-8B -m 8xH100 --tuner exhaustive
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.core.errors import require
    from shoal.cost.scaling_reports import scaling_report
    from shoal.cost.shapes import resolve
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.tune import TUNERS
    from shoal.plan.tune.shapley import explain as explained
    from shoal.plan.tune.training import TrainingObjective, training_space

    require(surrogate in ("gp", "forest"), "--surrogate", surrogate, expected="gp or forest")
    target = load(machine)
    shape = resolve(model)
    job = TrainJob(model=model, seq_len=seq_len, precision="bf16")
    fixed = dict(_axis(word) for word in fix or [])
    if nodes is not None:
        fixed["nodes"] = _values("--nodes", nodes)
    space = training_space(shape, target, fixed)
    objective = TrainingObjective(job, target)
    with WorkBar("tuning", quiet=quiet) as bar:
        study = TUNERS.build(tuner, where="--tuner").tune(
            space, objective, trials, seed=seed, progress=bar
        )
    best = study.best
    winner, cost = objective.price(best.config)
    found = (
        explained(study, surrogate="forest" if surrogate == "forest" else "gp", seed=seed)
        if (explain)
        else []
    )
    scaled = []
    if weak is not None:
        replicas = [int(value) for value in _values("--weak", weak)]
        scaled = scaling_report(winner, target, replicas, kind="weak")
    if out is not None:
        study.save(out, header="Trials of `shoal plan tune`.")
        typer.echo(f"saved {out}", err=output is Format.json)
    if output is Format.json:
        as_json(
            {
                "best": best.model_dump(mode="json", exclude_none=True),
                "step_s": cost.step_s.model_dump(mode="json"),
                "global_batch": winner.global_batch,
                "utilisation": objective.utilisation(winner, cost),
                "configurations": space.size,
                "trials": [t.model_dump(mode="json", exclude_none=True) for t in study.trials],
                "influence": [one.model_dump(mode="json") for one in found],
                "weak": [one.model_dump(mode="json") for one in scaled],
            }
        )
        return
    shown = [axis.name for axis in space.axes if len(axis.values) > 1]
    ranked = sorted(study.feasible, key=lambda t: -(t.value or 0.0))[:top]
    rows = [(f"{t.value:.1f}", *(t.config[name] for name in shown)) for t in ranked]
    table("trials, best first", ("TFLOP/s", *shown), rows, numeric="r" * (len(shown) + 1))
    failed = len(study.trials) - len(study.feasible)
    typer.echo(
        f"{len(study.trials)} of {space.size} configurations tried, {failed} failed; the best "
        f"reaches {100 * objective.utilisation(winner, cost):.1f} % of the peak with "
        f"{winner.global_batch} sequences a step of {cost.step_s.value:.3g} s; "
        f"{cost.bound} binds it"
    )
    if found:
        rows = [
            (
                one.axis,
                f"{one.influence:.2f}",
                f"{one.best:+.2f}",
                ", ".join(f"{value}: {mean:+.1f}" for value, mean in one.by_value.items()),
            )
            for one in found
        ]
        title = "what made the difference, in TFLOP/s (Shapley values)"
        table(title, ("axis", "influence", "in the best", "by value"), rows, numeric=" rr")
    if scaled:
        points = [
            (p.devices, p.replicas, p.global_batch, f"{p.step_s:.3g} s", f"{p.efficiency:.1%}")
            for p in scaled
        ]
        columns = ("devices", "replicas", "batch", "step", "efficiency")
        table("weak scaling of the best", columns, points, numeric="rrrrr")


def _axis(word: str) -> tuple[str, tuple[Setting, ...]]:
    from shoal.core.errors import require

    name, separator, text = word.partition("=")
    require(
        bool(separator and name and text),
        "--fix",
        word,
        expected="axis=value[,value...], such as microbatch=1,2",
    )
    return name, _values(f"--fix {name}", text)


def _values(where: str, text: str) -> tuple[Setting, ...]:
    from shoal.core.errors import require

    words = [word.strip() for word in text.split(",")]
    require(all(words), where, text, expected="values with commas between them, such as 1,2,4")
    return tuple(int(word) if word.isdigit() else word for word in words)
