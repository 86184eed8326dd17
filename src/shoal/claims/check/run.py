"""A check from beginning to end: one process, then the ranks, then what it means."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.claims.check.compare import Array
from shoal.claims.check.diagnose import ModuleOutput, StepEvidence, diagnose
from shoal.claims.check.protocols import CheckRow, CheckSettings, CheckVerdict, Finding
from shoal.claims.check.ranks import Processes
from shoal.claims.check.store import CheckDirectory, read_facts, read_tensors, write_facts
from shoal.core.errors import MissingExtraError, ShoalError, require
from shoal.core.scratch import scratch_directory

_SHOWN = 10


def check(settings: CheckSettings, tick: Callable[[str], None] = lambda _: None) -> CheckVerdict:
    """Run a file's training step in one process and split, and compare.

    The file is executed: it is a program like any other that its user starts.

    Args:
        settings: what to check.
        tick: called with what is being done.

    Raises:
        ConfigError: the file cannot be used, or fails; file and line.
        RankError: a rank died or hangs.
    """
    began = time.monotonic()
    if settings.path is not None:
        require(
            settings.path.is_file(),
            "FILE",
            settings.file,
            expected="a Python file, or a module's dotted name",
        )
    _require_torch()
    with scratch_directory("check") as directory:
        place = CheckDirectory(directory)
        write_facts(place.settings, settings.model_dump(mode="json"))
        Processes(place, settings, ["one"]).run(lambda text: tick(f"one process: {text}"))
        facts = read_facts(place.one)
        world = 1
        for size in facts["mesh"].values():
            world *= size
        ranks = Processes(place, settings, [str(rank) for rank in range(world)])
        notes = []
        try:
            ranks.run(lambda text: tick(f"{world} ranks: {text}"))
        except ShoalError as error:
            if not all(place.result(rank).exists() for rank in range(world)):
                raise
            notes.append(f"the diagnosis failed: {error}")
        results = [read_facts(place.result(rank)) for rank in range(world)]
        return _judge(settings, place, facts, results, notes, time.monotonic() - began)


def _require_torch() -> None:
    import importlib.util

    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "run", "shoal check")


def _judge(
    settings: CheckSettings,
    place: CheckDirectory,
    facts: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    notes: list[str],
    seconds: float,
) -> CheckVerdict:
    rows = _merge([CheckRow.model_validate(row) for result in results for row in result["rows"]])
    limit = settings.limit
    losses = [(one, split) for one, split in results[0]["losses"]]
    loss_bad = bool(losses) and not _near(*losses[-1], limit)
    bad = [row for row in rows if row.error > limit]
    order = {name: index for index, name in enumerate(facts["order"])}
    first = _first(bad, order)
    findings: list[Finding] = []
    if bad or loss_bad:
        evidence = _evidence(settings, place, facts, results, bad, losses, loss_bad)
        findings = diagnose(evidence) + _structure(bad, results)
    notes += sorted({note for result in results for note in result["loss_notes"]})
    idle = sorted({name for result in results for name in result["idle"]})
    if idle:
        notes.append(
            "not compared after the update, because their gradient is zero up to rounding: "
            f"{', '.join(idle)}"
        )
    if facts["unused"]:
        notes.append(f"without a gradient in one process: {', '.join(facts['unused'])}")
    worst: dict[str, float] = {}
    for row in rows:
        worst[row.kind] = max(worst.get(row.kind, 0.0), row.error)
    shown = sorted(bad or rows, key=lambda row: -row.error)
    named = [finding.names for finding in findings if finding.names]
    return CheckVerdict(
        equal=not bad and not loss_bad,
        file=settings.file,
        mesh=facts["mesh"],
        dtype=settings.dtype,
        tolerance=limit,
        steps=results[0]["steps"],
        losses=tuple(losses),
        loss_equal=not loss_bad,
        compared=len(rows),
        worst=worst,
        first=first,
        culprits=named[0] if named else ((first,) if first else ()),
        rows=tuple(shown if bad else shown[:_SHOWN]),
        findings=tuple(findings),
        notes=tuple(notes),
        seconds=seconds,
    )


def _near(one: float, split: float | None, limit: float) -> bool:
    return split is not None and abs(split - one) <= limit * abs(one)


def _merge(rows: Sequence[CheckRow]) -> list[CheckRow]:
    """Each tensor once, with its largest error of all ranks."""
    check_rows: dict[tuple[int, str, str], CheckRow] = {}
    for row in rows:
        key = (row.step, row.kind, row.name)
        if key not in check_rows or row.error > check_rows[key].error:
            check_rows[key] = row
    return list(check_rows.values())


def _first(bad: Sequence[CheckRow], order: Mapping[str, int]) -> str | None:
    kinds = ("start", "gradient", "parameter", "buffer")
    ordered = sorted(
        bad,
        key=lambda row: (row.step, kinds.index(row.kind), order.get(row.name, len(order))),
    )
    return ordered[0].name if ordered else None


def _structure(bad: Sequence[CheckRow], results: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Differences of which parameters there are."""
    lost = tuple(dict.fromkeys(row.name for row in bad if row.note == "no rank holds it"))
    extra = sorted({name for result in results for name in result["extra"]})
    outcome = []
    if lost:
        more = f"; the split model has {', '.join(extra[:4])} instead" if extra else ""
        outcome.append(
            Finding(
                kind="names",
                names=lost,
                text=f"no rank has {', '.join(lost[:4])}{more}: define rename(name) if the split "
                "model uses other names",
            )
        )
    noted: dict[str, list[str]] = {}
    for row in bad:
        if row.note and row.note not in ("no rank holds it", "not finite"):
            noted.setdefault(row.note, []).append(row.name)
    for note, names in noted.items():
        unique = tuple(dict.fromkeys(names))
        outcome.append(Finding(kind="shape", names=unique, text=f"{', '.join(unique[:4])}: {note}"))
    return outcome


def _evidence(
    settings: CheckSettings,
    place: CheckDirectory,
    facts: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    bad: Sequence[CheckRow],
    losses: Sequence[tuple[float, float | None]],
    loss_bad: bool,
) -> StepEvidence:
    step = results[0]["steps"] - 1
    one = read_tensors(place.one_tensors(step))
    before = read_tensors(place.one_tensors(step - 1)) if step >= 0 else {}
    tensors = [
        read_tensors(place.evidence(rank)) if place.evidence(rank).exists() else {}
        for rank in range(len(results))
    ]

    def named(start: str, held: Mapping[str, Array]) -> dict[str, Array]:
        return {name.removeprefix(start): x for name, x in held.items() if name.startswith(start)}

    wrong = {row.name for row in bad if row.kind == "gradient" and row.step == step}
    lost = losses[-1] if losses else (0.0, 0.0)
    solo = [named("solo/", held) for held in tensors]
    return StepEvidence(
        axes=facts["mesh"],
        coordinates=[result["coordinate"] for result in results],
        order=facts["order"],
        expected=named("gradient/", one),
        observed=[named("found/", held) for held in tensors],
        differing=[name for name in facts["order"] if name in wrong],
        solo=solo if all(solo) else (),
        output=_output(settings, results, tensors, before),
        loss=(lost[0], lost[0] if lost[1] is None else lost[1]),
        loss_differs=loss_bad,
        forward_equal=all(
            result["forward"] and all(row["error"] <= settings.limit for row in result["forward"])
            for result in results
        ),
        others=frozenset(row.kind for row in bad if row.kind != "gradient"),
        limit=settings.limit,
    )


def _output(
    settings: CheckSettings,
    results: Sequence[Mapping[str, Any]],
    tensors: Sequence[Mapping[str, Array]],
    before: Mapping[str, Array],
) -> ModuleOutput | None:
    """The first module whose output differs on some rank."""
    places = []
    for rank, result in enumerate(results):
        for index, row in enumerate(result["forward"]):
            if row["error"] > settings.limit:
                places.append((index, rank, row["module"]))
                break
    if not places:
        return None
    _, rank, module = min(places)
    split = tensors[rank].get(f"output/split/{module}")
    one = tensors[rank].get(f"output/one/{module}")
    if split is None or one is None:
        return None
    own = f"{module}."
    biases = {}
    for key, tensor in before.items():
        _, _, name = key.partition("/")
        if not key.startswith("buffer/") and name.startswith(own) and tensor.ndim == 1:
            biases[name] = tensor
    total = tensors[rank].get(f"output/total/{module}")
    return ModuleOutput(module=module, one=one, split=split, biases=biases, total=total)
