"""Types and units: texts that are numbers become numbers, spellings of a category one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.protocols import (
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
)
from shoal.fields.data.prepare.texts import UNITS, folded, in_base, parsed, trimmed
from shoal.ir import Estimate, Machine


@part
class Types(Preparation):
    """Read texts as numbers in the base of their units, and unify spellings.

    ``12 cm``, ``0.12m`` and ``120 mm`` become 0.12; ``1,200`` becomes 1200; a text that is no
    number is missing. ``NA``, ``?``, ``null`` and the like are missing in all columns that are
    named.

    Args:
        numbers: column -> unit of its numbers that have none; empty for none.
        categories: columns of text whose capitals and spaces do not count.
    """

    learns: ClassVar = False

    numbers: Mapping[str, str] = field(default_factory=dict)
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for column, unit in self.numbers.items():
            if unit not in UNITS:
                raise PrepareError(
                    f"preparation.types.numbers: {column}: {unit!r}: expected one of "
                    f"{', '.join(filter(None, UNITS))}, or nothing"
                )

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Texts of which most are numbers; categories in several spellings."""
        texts = [one for one in work.profile.numbers(work.target) if one.kind == "text"]
        usual = {
            one.name: max(
                (u for u in one.units if u in UNITS), key=lambda u: (u != "", one.units[u])
            )
            if any(u in UNITS for u in one.units)
            else ""
            for one in texts
        }
        categories = work.profile.texts(work.target)
        if usual or categories:
            measured = [f"{one.name}: {100 * one.numeric:.1f} % numbers" for one in texts]
            measured += [
                f"{one.name}: {one.distinct:.0f} texts, {one.folded:.0f} up to capitals and spaces"
                for one in categories
            ]
            yield (
                cls(numbers=usual, categories=tuple(one.name for one in categories)),
                Reason(
                    measured="; ".join(measured),
                    rule="text is read as numbers where 80 % are; other text is categories",
                ),
            )

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Parse and unify."""
        batch.chosen([*self.numbers, *self.categories], "", "types")
        changed = {}
        for name, bare in self.numbers.items():
            if batch.kind(name) == "text":
                numbers, units = parsed(batch.columns[name])
                changed[name] = column_of(in_base(numbers, units, bare))
        for name in batch.chosen(self.categories, "text", "types") if self.categories else ():
            changed[name] = folded(trimmed(batch.columns[name]))
        return batch.changed(changed)

    def estimate(self, work: PrepareWork, machine: Machine) -> Estimate:
        """Each text is looked at some times."""
        return self._estimate(work, len(self.numbers) + len(self.categories))

    def _value_s(self, rates: PrepareRates) -> float:
        return 3 * rates.text_s
