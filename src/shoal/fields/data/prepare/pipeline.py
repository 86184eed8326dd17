"""Steps one after another: fitted in as few passes as their columns allow, then applied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from shoal.core.errors import ConfigError
from shoal.core.files import write_json
from shoal.core.parts import Choice, table
from shoal.fields.data.prepare.batches import PrepBatch, batch_of
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.protocols import Learned, Preparation
from shoal.fields.data.prepare.sketches import Sketches, merged
from shoal.fields.data.readers import arrow

# Rows that are worked on at a time.
_ROWS = 65_536


class FittedStep(NamedTuple):
    """A step, and what it has learned."""

    step: Preparation
    learned: Learned

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        choice = table("preparation").spell(self.step).model_dump(mode="json")
        return {"step": choice, "learned": dict(self.learned)}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Self:
        """From JSON."""
        step = table("preparation").build(Choice.model_validate(data["step"]), where="steps")
        return cls(step, data["learned"])


Gather = Callable[[Sequence[FittedStep], Sequence[Preparation]], list[Sketches]]
"""(steps that rows pass first, steps that look at them) -> what each of these has seen."""


def build_steps(
    steps: Iterable[Preparation | Choice | str | Mapping[str, Any]],
) -> list[Preparation]:
    """Steps by their names and options.

    Raises:
        ConfigError: there is no such step, or an option is wrong.
        PrepareError: rows would be left out after they were made k-anonymous.
    """
    made = [
        one if isinstance(one, Preparation) else table("preparation").build(one, where="steps")
        for one in steps
    ]
    fixed: Preparation | None = None
    for step in made:
        if fixed is not None and step.drops_rows:
            raise PrepareError(
                f"steps: {_name(step)} leaves out rows after {_name(fixed)}, which counts them; "
                "put it before"
            )
        fixed = step if step.counts_rows else fixed
    return made


def _name(step: Preparation) -> str:
    return table("preparation").spell(step).name


def apply(batch: PrepBatch, fitted: Iterable[FittedStep]) -> PrepBatch:
    """The rows after all steps."""
    for step, learned in fitted:
        batch = step.transform(batch, learned)
    return batch


def look(batch: PrepBatch, steps: Sequence[Preparation]) -> list[Sketches]:
    """What each step gathers from a batch."""
    return [step.sketch(batch) for step in steps]


def fit(
    steps: Sequence[Preparation],
    gather: Gather,
    nothing: PrepBatch,
    begin: Sequence[FittedStep] = (),
    keep: Callable[[Sequence[FittedStep]], None] = lambda fitted: None,
) -> list[FittedStep]:
    """Fit steps one after another; those that do not depend on each other in one pass.

    Args:
        steps: all of them.
        gather: makes a pass.
        nothing: no rows, with the columns of the data.
        begin: steps that were fitted before.
        keep: called with what is fitted, after each pass.

    Raises:
        PrepareError: a step cannot work on these columns.
    """
    fitted = list(begin)
    while len(fitted) < len(steps):
        empty = apply(nothing, fitted)
        group = together(steps[len(fitted) :], empty)
        learning = [step for step in group if step.learns]
        found = iter(gather(fitted, learning) if learning else ())
        fitted += [
            FittedStep(step, step.learn(next(found)) if step.learns else {}) for step in group
        ]
        keep(fitted)
    return fitted


def passes_of(steps: Sequence[Preparation], nothing: PrepBatch | None = None) -> int:
    """Passes over the data that fitting takes, where all columns that are named are there."""
    left, passes = list(steps), 0
    while left:
        group = together(left, nothing)
        passes += any(step.learns for step in group)
        left = left[len(group) :]
    return passes


def together(steps: Sequence[Preparation], empty: PrepBatch | None) -> list[Preparation]:
    """The first steps of which none changes what a later one looks at."""
    group, touched = [steps[0]], _columns(steps[0])
    for step in steps[1:]:
        columns = _columns(step)
        if (
            touched is None
            or columns is None
            or touched & columns
            or (
                empty is not None and (empty.target in touched or not columns <= set(empty.columns))
            )
        ):
            break
        group.append(step)
        touched = touched | columns
    return group


def _columns(step: Preparation) -> set[str] | None:
    """Columns that a step names; None where it may touch any, or rows."""
    names = getattr(step, step.touches) if step.touches and not step.drops_rows else ()
    return set(names) or None


class PrepPipeline:
    """Steps of preparation for tables in memory, as scikit-learn has them.

    Args:
        steps: names, mappings with ``name`` and options, or parts, in order.
        target: column that is to be predicted; empty for none.

    Examples:
        >>> import pyarrow as pa
        >>> rows = pa.table({"size": ["1 m", "50 cm", None], "colour": ["red", "blue", "red"]})
        >>> steps = [{"name": "types", "numbers": {"size": "m"}}, "impute", "one_hot"]
        >>> PrepPipeline(steps).fit_transform(rows).to_pydict()
        {'size': [1.0, 0.5, 0.75], 'colour=blue': [0.0, 1.0, 0.0], 'colour=red': [1.0, 0.0, 1.0]}
    """

    def __init__(
        self, steps: Iterable[Preparation | Choice | str | Mapping[str, Any]], target: str = ""
    ) -> None:
        self.steps, self.target = build_steps(steps), target
        self.fitted: list[FittedStep] = []

    def fit(self, rows: Any) -> Self:
        """Learn from training rows.

        Args:
            rows: table or record batch of Arrow.

        Raises:
            PrepareError: a step cannot work on these columns.
        """
        batches = list(self._batches(rows, training=True))

        def gather(before: Sequence[FittedStep], group: Sequence[Preparation]) -> list[Sketches]:
            found: list[Sketches] = [{} for _ in group]
            for batch in batches:
                seen = look(apply(batch, before), group)
                found = [merged(*both) for both in zip(found, seen, strict=True)]
            return found

        nothing = batch_of(rows.slice(0, 0), np.empty(0, np.int64), self.target)
        self.fitted = fit(self.steps, gather, nothing)
        return self

    def transform(self, rows: Any) -> Any:
        """Prepare rows that nothing was learned from, as a table of Arrow."""
        return self._apply(rows, training=False)

    def fit_transform(self, rows: Any) -> Any:
        """Learn from training rows, and prepare them: encodings are out of fold."""
        return self.fit(rows)._apply(rows, training=True)

    def _apply(self, rows: Any, training: bool) -> Any:
        batches = self._batches(rows, training)
        return arrow().Table.from_batches([apply(one, self.fitted).to_arrow() for one in batches])

    def _batches(self, rows: Any, training: bool) -> Iterable[PrepBatch]:
        for first in range(0, max(rows.num_rows, 1), _ROWS):
            piece = rows.slice(first, _ROWS)
            places = np.arange(first, first + piece.num_rows, dtype=np.int64)
            yield batch_of(piece, places, self.target, training)

    def save(self, path: Path) -> None:
        """Write what was learned as JSON."""
        steps = [one.dump() for one in self.fitted]
        write_json(path, {"target": self.target, "steps": steps})

    @classmethod
    def load(cls, path: Path) -> Self:
        """What :meth:`save`, or a run, has written.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            data = json.loads(path.read_bytes())
            fitted = [FittedStep.load(one) for one in data["steps"]]
            made = cls((one.step for one in fitted), data["target"])
        except (OSError, ValueError, KeyError, TypeError) as cause:
            if isinstance(cause, ConfigError):
                raise
            raise ConfigError(
                f"{path}: no pipeline ({cause}); give one that a run wrote"
            ) from cause
        made.fitted = fitted
        return made
