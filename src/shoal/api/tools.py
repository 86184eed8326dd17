"""``shoal.explain``, ``shoal.check`` and ``shoal.score``."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.explaining import explain_parts, find_parts
from shoal.api.jobs import machine_of
from shoal.api.probing import silent
from shoal.core.config import parse
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table
from shoal.ir import Explanation, Machine
from shoal.ir.explanation import Progress
from shoal.plan.saved import read_plan

if TYPE_CHECKING:
    from shoal.claims.check.protocols import CheckVerdict
    from shoal.cost.imports.measure import ImportedLog
    from shoal.cost.score import Score


def explain(
    name: str,
    /,
    *,
    machine: str | PathLike[str] | Machine | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Explanation:
    """Explain a technique: tables, sentences, a picture.

    A study is calculated for a machine. Of any other part these are its options, its traits and
    what its papers claim; of a kind, its parts.

    Args:
        name: of a study, a part or a kind. Where several kinds have a part of that name, each is
            explained under its full name, ``KIND.PART``, which picks one of them.
            ``shoal explain`` lists all.
        machine: what a study is calculated for; the study's own default if None.
        progress: called with (done, total, what is done).
        **options: fields of a study.

    Raises:
        UnknownPartError: there is no such part; names the nearest one.
        ShoalError: an option does not fit.

    Examples:
        >>> shoal.explain("schedule", schedule="zbv", pp=4, microbatches=8)
        >>> shoal.explain("medusa")
        >>> shoal.explain("speculative.medusa")
    """
    found = find_parts(name)
    kind, part = found[0]
    if kind != "study" or part is None:
        given = [*options, *(["machine"] if machine is not None else [])]
        if given:
            raise ConfigError(
                f"explain {name}: {', '.join(given)}: only studies take options; leave it out"
            )
        return explain_parts(found)
    cls = table("study").load(part)
    study = table("study").build(Choice(name=part, options=options), where="explain")
    wanted = getattr(cls, "machine", "local") if machine is None else machine
    explanation: Explanation = study.explain(machine_of(wanted) if wanted else None, progress)
    return explanation


def check(
    file: str | PathLike[str], *, progress: Progress = silent, **settings: Any
) -> CheckVerdict:
    """Whether a parallel training step equals one process; what does not, by name.

    Args:
        file: a Python file, or a module's dotted name, with ``model()``, ``batch(step)``,
            ``loss(model, batch)`` and ``parallelize(model, mesh)``; it is executed.
        progress: called with (done, total, what is done).
        **settings: fields of :class:`~shoal.claims.check.protocols.CheckSettings`, such as
            ``ranks=4``, ``mesh={"dp": 2, "tp": 2}`` or ``"dp=2,tp=2"``, ``steps=3``,
            ``dtype="float32"``.

    Raises:
        ConfigError: the file or a setting cannot be used.
        RankError: a rank died or hangs.
    """
    from shoal.claims.check.protocols import CheckSettings, parse_mesh
    from shoal.claims.check.run import check as compare

    if isinstance(mesh := settings.get("mesh"), str):
        settings["mesh"] = parse_mesh(mesh)
    asked = parse(CheckSettings, {"file": str(file), **settings}, where="")
    return compare(asked, lambda text: progress(0, 0, text))


def score() -> Score:
    """Every past prediction beside what was measured; see :class:`~shoal.cost.score.Score`."""
    from shoal.cost.score import Score

    return Score()


def import_log(
    path: str | PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the option's name
    plan: str | PathLike[str] | None = None,
) -> ImportedLog:
    """Read what another engine logged; with its plan, keep it in the score.

    Args:
        path: the log.
        format: a part of kind ``log``, or auto.
        plan: file of the plan that was run.

    Raises:
        DataError: the log cannot be read, or is of another job than the plan.
    """
    from shoal.cost.imports.measure import ImportedLog, measure, read, report

    planned = None if plan is None else read_plan(Path(plan))
    measured = measure(read(Path(path), format), planned)
    scored = None if planned is None else report(measured, planned)
    if scored is not None:
        score().append(scored)
    return ImportedLog(measured, scored)
