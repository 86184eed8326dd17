"""What ``shoal bench decode`` measured on this machine, for plans to cite.

The newest row of every target, method and size of batch is kept in ``decoding.json`` beside the
machine's description. It is cited for the machine on which it was measured, and for no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import PositiveInt

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, StoreError
from shoal.core.files import shoal_home, write_json
from shoal.core.parts import table as table_of
from shoal.ir import Machine, ServeJob

# What of a fingerprint makes two machines one for the speed of steps.
_TELLING = ("cpu", "isa", "cores")


class MeasuredRow(Value):
    """One method on one target, beside plain decoding.

    Args:
        method: a part of kind ``speculative``, or another way that was measured beside them.
        batch: requests that were answered together.
        speedup: tokens/s over plain decoding's.
        low: lower end of its 90 % interval.
        high: upper end.
        tokens_per_step: of a request.
    """

    method: str
    batch: PositiveInt
    speedup: float
    low: float
    high: float
    tokens_per_step: float
    date: str


class MeasuredTable(Value):
    """All methods on one target.

    Args:
        models: what the target is called: its directory, and the zoo's name for it.
        precision: of the target.
    """

    target: str
    models: tuple[str, ...]
    machine: dict[str, str]
    precision: str
    rows: tuple[MeasuredRow, ...]

    def of(self, method: str) -> tuple[MeasuredRow, ...]:
        """The rows of one method, smallest batch first."""
        return tuple(
            sorted((one for one in self.rows if one.method == method), key=lambda one: one.batch)
        )

    def paying(self) -> tuple[str, ...]:
        """Methods that are surely faster than plain decoding of a single request, fastest first."""
        alone = [one for one in self.rows if one.batch == 1 and one.low > 1]
        return tuple(one.method for one in sorted(alone, key=lambda one: -one.speedup))


def _place() -> Path:
    return shoal_home() / "decoding.json"


def _all() -> list[MeasuredTable]:
    """What is kept; nothing where no file is.

    Raises:
        ConfigError: the file is damaged.
    """
    path = _place()
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as cause:
        raise ConfigError(
            f"{path}: cannot be read ({cause}); remove it, and shoal bench decode measures again"
        ) from cause
    if not isinstance(raw, list):
        raise ConfigError(f"{path}: expected a list of tables; remove it and measure again")
    return [parse(MeasuredTable, one, where=str(path)) for one in raw]


def _same_machine(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    return all(key in a and a[key] == b.get(key) for key in _TELLING)


def keep(new: MeasuredTable) -> Path:
    """Put rows into the file; older ones of the same target, method and batch are replaced.

    Raises:
        ConfigError: the file is damaged.
        StoreError: it cannot be written.
    """
    kept = []
    rows = list(new.rows)
    for old in _all():
        same = old.target == new.target and old.precision == new.precision
        if not same or not _same_machine(old.machine, new.machine):
            kept.append(old)
            continue
        fresh = {(one.method, one.batch) for one in new.rows}
        rows += [one for one in old.rows if (one.method, one.batch) not in fresh]
        new = new.model_copy(update={"models": tuple(dict.fromkeys([*new.models, *old.models]))})
    tables = [*kept, new.model_copy(update={"rows": tuple(rows)})]
    path = _place()
    write_json(path, [one.model_dump(mode="json") for one in tables], error=StoreError)
    return path


def find(
    machine: Mapping[str, str], *, target: str | None = None, model: str | None = None
) -> MeasuredTable | None:
    """The table of a target on a machine, the newest if there are several precisions.

    Args:
        machine: fingerprint of the machine that is planned for.
        target: fingerprint of the target's weights; or
        model: its directory, or its name in the zoo.

    Raises:
        ConfigError: the file is damaged.
    """
    names = set() if model is None else {model, str(Path(model).resolve())}
    for table in reversed(_all()):
        known = table.target == target or not names.isdisjoint(table.models)
        if known and _same_machine(table.machine, machine):
            return table
    return None


def sentence(method: str, rows: Iterable[MeasuredRow]) -> str:
    """What was measured of a method, in words."""
    rows = list(rows)
    text = ", ".join(
        f"{one.speedup:.2f}x with {one.batch} request{'s' if one.batch > 1 else ''}" for one in rows
    )
    dates = sorted({one.date for one in rows})
    return f"{method} over plain decoding, measured on this machine: {text} ({', '.join(dates)})"


def how_to(method: str, model: str, path: str | None = None) -> str:
    """The command that measures a method on a target.

    Args:
        method: its name.
        model: the target.
        path: of the drafter, where it has one.
    """
    drafter = f" --drafter {method}={path}" if path else ""
    return f"shoal bench decode --model {model} --methods {method}{drafter} --batch 1,4,16"


def decoding_notes(job: ServeJob, machine: Machine) -> tuple[str, ...]:
    """What a plan says of guessing: what was measured, or how to measure it.

    Raises:
        ConfigError: what was kept is damaged.
    """
    table = find(machine.fingerprint, model=job.model)
    if job.speculative is None:
        paying = table.paying()[:1] if table is not None else ()
        return tuple(
            f"speculative decoding would be faster: {sentence(name, table.of(name))}"
            for name in paying
            if table is not None
        )
    name = job.speculative.name
    rows = () if table is None else table.of(name)
    if rows:
        return (sentence(name, rows),)
    path = job.speculative.options.get("path")
    assumes = table_of("speculative").build(job.speculative).expects().assumes
    return (
        f"what {name} gives here is predicted{', ' if assumes else ''}{assumes}, and was not "
        f"measured; to measure it on that machine: {how_to(name, job.model, path)}",
    )
