"""ConstrINT: small systems of constraints over integers, solved completely.

A system is text: facts, domains, constraints, and at most one objective, one a line or parted
by ``;``. What follows ``#`` is a remark::

    lanes = 16                          # a fact
    rows in {1, 2, 4, 6}                # a domain: values,
    units in 16..4096 % 16              # bounds, a factor that is required,
    warps in 1..32 primes {2}           # primes that are allowed
    registers: rows * 4 + 5 <= 32       # a constraint, with a name or without
    units % lanes == 0                  # divisibility; a % b == 0 also says that b is not 0
    (rows == 6; units >= 64) | rows == 1    # one of them holds; within brackets ; is "and"
    maximize rows * units               # or minimize

Expressions have ``+ - *``, brackets and powers ``a ** 3`` with a constant exponent; relations are
``== <= >= < >``. Every variable has finite bounds, so every question has an answer, which
:func:`solve` finds: a solution, the best one, or the proof that there is none, in which case it
names constraints that cannot hold together.

How: domains are narrowed until nothing changes, by interval arithmetic through sums, products and
powers in both directions, by common factors (of sums, products, equalities and divisibility) and
by the primes that equal products share; a domain of fewer than 2048 candidates is a list of
values. Then the smallest domain is split, its largest value first, each branch on a copy.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024 (ConstrINT);
Benhamou et al., Revising Hull and Box Consistency, 1999 (narrowing through expressions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.errors import PlanError
from shoal.plan.constrint.domain import Domain, Empty
from shoal.plan.constrint.terms import Box, Constraint, Number, Relation
from shoal.plan.constrint.text import ConstraintSystem, ConstraintText, parse

__all__ = ["ConstraintSystem", "Solution", "UnsatisfiableError", "brute_force", "parse", "solve"]

# Narrowing of a bound that only creeps is stopped after so many rounds; the search goes on.
_ROUNDS = 64


class UnsatisfiableError(PlanError):
    """No assignment satisfies the system.

    Args:
        message: what conflicts, in words.
        conflict: texts of constraints that cannot hold together.
        nodes: nodes of the search that proved it.
    """

    def __init__(self, message: str, conflict: tuple[str, ...], nodes: int) -> None:
        super().__init__(message)
        self.conflict = conflict
        self.nodes = nodes


@dataclass(frozen=True)
class Solution(Mapping[str, int]):
    """An assignment that satisfies a system, and is the best where there is an objective.

    Args:
        nodes: nodes that the search visited.
    """

    assignment: dict[str, int]
    objective: int | None = None
    nodes: int = 0

    def __getitem__(self, name: str) -> int:
        return self.assignment[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.assignment)

    def __len__(self) -> int:
        return len(self.assignment)


def solve(text: str | Sequence[str], *, max_nodes: int | None = None) -> Solution:
    """The best solution of a system.

    Args:
        text: the system, or its statements.
        max_nodes: nodes of the search after which it gives up; never, if None.

    Raises:
        ConfigError: the text cannot be read; names the statement.
        UnsatisfiableError: no assignment satisfies it; names constraints that conflict.
        PlanError: it gave up.
    """
    system = parse(text)
    search = _Search(max_nodes)
    result = search.best(system.domains, system.constraints, system)
    if result is None:
        conflict = _conflict(system)
        raise _explained(system, conflict, search.nodes)
    return Solution(result, system.score(result), search.nodes)


def brute_force(
    system: ConstraintSystem, *, max_leaves: int | None = None
) -> tuple[dict[str, int] | None, int, bool]:
    """Try every assignment of the box, in order: what :func:`solve` is compared with.

    Args:
        system: what to solve.
        max_leaves: assignments after which to stop.

    Returns:
        tuple: the first solution or the first of the best ones (None: no solution seen), how
        many assignments were tried, and whether that was enough to know.
    """
    names = list(system.domains)
    lists = [list(system.domains[name].candidates()) for name in names]
    best: dict[str, int] | None = None
    score: int | None = None
    place, leaves = [0] * len(names), 0
    while all(lists):
        if max_leaves is not None and leaves >= max_leaves:
            return best, leaves, False
        leaves += 1
        at = {name: lists[i][place[i]] for i, name in enumerate(names)}
        if all(stated.constraint.holds(at) for stated in system.constraints):
            if system.objective is None:
                return at, leaves, True
            value = system.sign * system.objective.value(at)
            if score is None or value * system.sign > score * system.sign:
                best, score = at, value
        for i in reversed(range(len(names))):
            place[i] += 1
            if place[i] < len(lists[i]):
                break
            place[i] = 0
        else:
            break
    return best, leaves, True


@dataclass
class _Search:
    """Narrowing and backtracking; counts the nodes it visits."""

    max_nodes: int | None = None
    nodes: int = 0
    _score: int | None = field(default=None, repr=False)

    def best(
        self,
        domains: Mapping[str, Domain],
        stated: Sequence[ConstraintText],
        system: ConstraintSystem,
    ) -> dict[str, int] | None:
        """The best assignment, or None if there is none."""
        constraints = [one.constraint for one in stated]
        best: dict[str, int] | None = None
        self._score = None
        stack: list[Box] = [dict(domains)]
        while stack:
            box = stack.pop()
            self.nodes += 1
            if self.max_nodes is not None and self.nodes > self.max_nodes:
                raise PlanError(
                    f"constrint: no answer after {self.max_nodes} nodes; raise max_nodes or "
                    "narrow the domains"
                )
            try:
                _fixpoint(box, constraints, self._bounded(system))
            except Empty:
                continue
            free = [name for name, domain in box.items() if not domain.fixed]
            if not free:
                at = {name: domain.low for name, domain in box.items()}
                if not all(one.holds(at) for one in (*constraints, *self._bounded(system))):
                    continue
                best = at
                if system.objective is None:
                    return best
                self._score = system.objective.value(at)
                continue
            name = min(free, key=lambda one: box[one].size)
            for domain in _split(box[name]):
                stack.append({**box, name: domain})
        return best

    def _bounded(self, system: ConstraintSystem) -> tuple[Constraint, ...]:
        """Better than the best so far."""
        if system.objective is None or self._score is None:
            return ()
        return (Relation(Number(self._score + 1), system.objective, False, system.objective.names),)


def _split(domain: Domain) -> list[Domain]:
    """Branches of a domain, the one with the largest value last: it is taken first."""
    if domain.values is not None:
        values = domain.values
        if len(values) <= 64:
            return [Domain(v, v, (v,), abs(v) or 1, domain.primes) for v in values]
        half = len(values) // 2
        return [Domain.of(part) for part in (values[:half], values[half:])]
    middle = (domain.low + domain.high) // 2
    branches = []
    for low, high in ((domain.low, middle), (middle + 1, domain.high)):
        try:
            branches.append(domain.narrowed(low, high))
        except Empty:
            continue
    return branches


def _fixpoint(box: Box, constraints: Sequence[Constraint], more: Sequence[Constraint] = ()) -> None:
    """Narrow the box until no constraint changes it.

    Raises:
        Empty: no solution is in it.
    """
    everything = [*constraints, *more]
    changed: set[str] | None = None
    for _ in range(_ROUNDS):
        before = dict(box)
        for constraint in everything:
            if changed is None or constraint.names & changed:
                constraint.narrow(box)
        changed = {name for name, domain in box.items() if domain is not before[name]}
        if not changed:
            return


def _conflict(system: ConstraintSystem) -> tuple[ConstraintText, ...]:
    """Constraints that cannot hold together, none of which could be left out."""
    kept = list(system.constraints)
    # Enough for systems of this size; what costs more to judge stays in.
    budget = 2000
    for one in list(kept):
        rest = [other for other in kept if other is not one]
        try:
            result = _Search(budget).best(
                system.domains, rest, ConstraintSystem(system.domains, tuple(rest))
            )
        except PlanError:
            continue
        if result is None:
            kept = rest
    return tuple(kept)


def _explained(
    system: ConstraintSystem, conflict: Sequence[ConstraintText], nodes: int
) -> UnsatisfiableError:
    names = sorted(frozenset().union(*(one.constraint.names for one in conflict)))
    facts = ", ".join(
        f"{name} = {system.domains[name].low}" for name in names if name in system.facts
    )
    free = ", ".join(
        f"{name} in {system.domains[name]}" for name in names if name not in system.facts
    )
    text = "; ".join(one.text for one in conflict)
    which = "this constraint cannot hold" if len(conflict) == 1 else "these constraints conflict"
    message = f"constrint: no solution: {which}: {text}"
    if free:
        message += f" (where {free})"
    if facts:
        message += f" with {facts}"
    return UnsatisfiableError(
        message + "; widen a domain or drop one of them",
        tuple(one.text for one in conflict),
        nodes,
    )
