"""Who owes whom how many blocks, and who should lend to whom: advice, not orders.

Each instance says at times how it is (:class:`InstanceStatus`). From that the ledger keeps the
debts, and
proposes loans: the instance that gains most throughput by room, and the lenders that lose least
by attending for it, as long as the sum improves. What it knows may be old. So a lender may refuse
what was proposed, and there is no lock; the debtor's next word corrects the ledger.

Nothing here reads a clock: ``now`` is an argument.

Source: Lin et al., Infinite-LLM, 2024, sections 4.2 and 4.3 (gManager, debt ledger, placement).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shoal.core.errors import ServeError
from shoal.ir import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """How an instance is.

    Args:
        lendable: blocks that it would lend now.
        short: blocks missing for its next request; 0 if no request waits for memory.
        waiting: tokens of that request.
        ahead: blocks that those that run will soon lack.
        contexts: tokens of each request that runs.
        borrowed: creditor -> blocks of it that this one has.
        node: instances of the same node are preferred.
    """

    instance: int
    lendable: int = 0
    short: int = 0
    waiting: int = 0
    ahead: int = 0
    contexts: tuple[int, ...] = ()
    borrowed: Mapping[int, int] = field(default_factory=dict)
    node: str = ""


class Loan(NamedTuple):
    """Blocks that one instance borrows from another, or should borrow or return."""

    debtor: int
    creditor: int
    blocks: int


def throughput(cost: StepCost, contexts: Sequence[int], attended: int = 0) -> float:
    """Tokens per s of a decode instance for requests of these contexts.

    Args:
        cost: of its steps.
        contexts: tokens of each request.
        attended: tokens that others ask it to attend to in every step, too.
    """
    if not contexts:
        return 0.0
    first, *others = contexts
    return len(contexts) / cost.seconds([(first + attended, 1), *((one, 1) for one in others)])


class LoanRegistry:
    """The books of all debts, and advice on new ones.

    Args:
        cost: seconds of a step, equal on all instances.
        timeout_s: s of silence after which an instance is lost.
        max_lenders: most lenders of one loan.
    """

    def __init__(
        self,
        instances: int,
        block_size: int,
        cost: StepCost,
        *,
        timeout_s: float = 10.0,
        max_lenders: int = 4,
    ) -> None:
        self.block_size, self.cost = block_size, cost
        self.timeout_s, self.max_lenders = timeout_s, max_lenders
        self._beats = {number: InstanceStatus(instance=number) for number in range(instances)}
        self._heard: dict[int, float] = {}

    @property
    def instances(self) -> Collection[int]:
        """Those that are not lost."""
        return self._beats.keys()

    def beat(self, beat: InstanceStatus, now: float) -> None:
        """An instance reports its state; one that was lost stays lost."""
        if beat.instance in self._beats:
            self._beats[beat.instance] = beat
            self._heard[beat.instance] = now

    def silent(self, now: float) -> list[int]:
        """Instances that have not reported for too long; those that never did are just starting."""
        return [one for one in self._beats if now - self._heard.get(one, now) > self.timeout_s]

    def lose(self, instance: int) -> list[int]:
        """Strike an instance out; its debtors, whose requests there are to be computed again."""
        debtors = [debt.debtor for debt in self.debts if debt.creditor == instance]
        self._beats.pop(instance, None)
        return debtors

    @property
    def debts(self) -> list[Loan]:
        """All debts between instances that are not lost."""
        return [
            Loan(debtor, creditor, blocks)
            for debtor, beat in self._beats.items()
            for creditor, blocks in sorted(beat.borrowed.items())
            if blocks and creditor in self._beats
        ]

    def balances(self) -> dict[int, int]:
        """What each has lent less what it has borrowed; they add up to nothing."""
        balances = dict.fromkeys(self._beats, 0)
        for debt in self.debts:
            balances[debt.debtor] -= debt.blocks
            balances[debt.creditor] += debt.blocks
        return balances

    def require_room(self, request: str, n_tokens: int, own: int, lent: int) -> None:
        """Refuse a request that not all memory together holds.

        Args:
            request: its id.
            n_tokens: most that it ever keeps.
            own: blocks of its instance.
            lent: blocks that others would lend it.

        Raises:
            ServeError: it says how many blocks are missing.
        """
        need = -(-n_tokens // self.block_size)
        if need > own + lent:
            raise ServeError(
                f"request {request}: {n_tokens} tokens to keep in the cache need {need} blocks: "
                f"expected at most {own + lent}, the {own} of its instance and {lent} that others "
                f"lend; {need - own - lent} blocks are missing: shorten it, or serve with more "
                "kv_tokens or more instances"
            )

    def proposed(self, debtor: int) -> None:
        """A loan was proposed: until the debtor's next word it wants no more."""
        beat = self._beats[debtor]
        self._beats[debtor] = replace(beat, short=0, ahead=0)

    def recalls(self) -> list[Loan]:
        """Debts to end, so that no instance both lends and borrows.

        It can come to that when two act on old news. Of such an instance's loans as many blocks
        are called back as it has borrowed itself; the smallest loans first.
        """
        results = []
        for instance, beat in self._beats.items():
            excess = sum(beat.borrowed.values())
            loans = sorted(
                (debt for debt in self.debts if debt.creditor == instance),
                key=lambda debt: debt.blocks,
            )
            for debt in loans:
                if excess <= 0:
                    break
                results.append(debt)
                excess -= debt.blocks
        # Of two that owe each other only one need give back.
        pairs: set[frozenset[int]] = set()
        kept = []
        for debt in sorted(results, key=lambda debt: debt.blocks):
            pair = frozenset((debt.debtor, debt.creditor))
            if pair not in pairs:
                pairs.add(pair)
                kept.append(debt)
        return kept

    def loans(self) -> list[Loan]:
        """Loans to propose now, the one that gains most throughput first."""
        beats = self._beats
        free = {one: beat.lendable for one, beat in beats.items()}
        attended = dict.fromkeys(beats, 0)
        for debt in self.debts:
            attended[debt.creditor] += debt.blocks * self.block_size
        lending = {debt.creditor for debt in self.debts}
        wanting = [
            (self._gain(beat), beat)
            for beat in beats.values()
            if beat.short + beat.ahead and beat.instance not in lending
        ]
        wanting.sort(key=lambda pair: (-pair[0], pair[1].instance))
        loans: list[Loan] = []
        for gain, beat in wanting:
            # Who will borrow in this round does not lend in it.
            others = {one: left for one, left in free.items() if one != beat.instance and left}
            chosen = self._cheapest(beat, others, attended)
            need = beat.short + beat.ahead
            if sum(debt.blocks for debt in chosen) < (beat.short or 1):
                continue  # even all together do not let the next one in
            worse = sum(self._worse(debt, attended[debt.creditor]) for debt in chosen)
            if need and gain > worse:
                for debt in chosen:
                    free[debt.creditor] -= debt.blocks
                    attended[debt.creditor] += debt.blocks * self.block_size
                free[beat.instance] = 0
                loans += chosen
        return loans

    def _gain(self, beat: InstanceStatus) -> float:
        """Tokens per s more by one more request, of which the loan's part is attended elsewhere.

        Room for those that run is worth any price: one that gives way is computed again.
        """
        if not beat.short:
            return math.inf
        here = max(1, beat.waiting - beat.short * self.block_size)
        return throughput(self.cost, (*beat.contexts, here)) - throughput(self.cost, beat.contexts)

    def _worse(self, debt: Loan, attended: int) -> float:
        """Tokens per s that a lender loses by a loan."""
        contexts = self._beats[debt.creditor].contexts
        more = attended + debt.blocks * self.block_size
        before = throughput(self.cost, contexts, attended)
        return before - throughput(self.cost, contexts, more)

    def _cheapest(
        self, beat: InstanceStatus, free: Mapping[int, int], attended: Mapping[int, int]
    ) -> list[Loan]:
        """Lenders for what an instance wants: near ones first, then those that lose least."""
        left, chosen = beat.short + beat.ahead, []
        known = {one for one, blocks in beat.borrowed.items() if blocks}

        def rank(one: int) -> tuple[bool, bool, float, int]:
            offer = Loan(beat.instance, one, min(left, free[one]))
            share = self._worse(offer, attended[one]) / offer.blocks
            return self._beats[one].node != beat.node, one not in known, share, one

        for one in sorted(free, key=rank)[: self.max_lenders]:
            if left <= 0:
                break
            chosen.append(Loan(beat.instance, one, min(left, free[one])))
            left -= chosen[-1].blocks
        return chosen
