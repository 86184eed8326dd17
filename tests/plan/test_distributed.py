"""Books of instances that lend each other blocks: nothing is lost, and debts add up to nothing."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.errors import ConfigError, ServeError
from shoal.core.parts import table
from shoal.cost.step_cost.lending import LendingStepCost
from shoal.ir import Arrival, Chunk, Copy, Request, SamplingParams, SchedulerLimits, Step
from shoal.plan.batching.cache.borrowing import Borrower
from shoal.plan.batching.cache.distributed import (
    UNBACKED,
    BlockLoan,
    Distributed,
    DistributedBlocks,
    place_of,
    reference,
)
from shoal.plan.batching.cache.loans import InstanceStatus, Loan, LoanRegistry, throughput
from shoal.plan.batching.schedulers.fcfs import Fcfs
from shoal.plan.serving.lending import simulate_lending

SIZE = 4


class Linear:
    """A step: 1 s for the weights, and a thousandth for every token attended to."""

    def seconds(self, chunks) -> float:
        return 1.0 + sum(1e-3 * start + 0.05 * length for start, length in chunks)


def request(name: str, length: int) -> Request:
    return Request(name, [1] * length, length, SamplingParams(max_tokens=8))


class Several(RuleBasedStateMachine):
    """Three instances whose requests grow, move, end and are lost, with words that come late."""

    @initialize(watermark=st.integers(0, 3), lenders=st.integers(1, 3))
    def start(self, watermark: int, lenders: int) -> None:
        self.books = {
            number: DistributedBlocks(
                12, SIZE, watermark=watermark, max_lenders=lenders, prefix_reuse=number == 0
            )
            for number in range(3)
        }
        self.requests: dict[int, dict[str, Request]] = {number: {} for number in self.books}
        self.flights: dict[int, list[BlockLoan]] = {number: [] for number in self.books}
        self.released: dict[tuple[int, int], list[int]] = {}
        self.count = 0

    def pick(self, data, of) -> int:
        return data.draw(st.sampled_from(sorted(of)))

    @rule(data=st.data(), length=st.integers(1, 70))
    def admit(self, data, length: int) -> None:
        number = self.pick(data, self.books)
        self.count += 1
        made = request(f"r{self.count}", length)
        kv = self.books[number]
        kv.match_prefix(made)
        if kv.allocate(made, length):
            self.requests[number][made.id] = made
        else:
            kv.free(made)
            assert kv.short > 0

    @precondition(lambda self: any(self.requests.values()))
    @rule(data=st.data(), tokens=st.integers(1, 30))
    def compute(self, data, tokens: int) -> None:
        """A chunk, as far as there is memory."""
        number = self.pick(data, [n for n, some in self.requests.items() if some])
        made = self.requests[number][self.pick(data, self.requests[number])]
        kv = self.books[number]
        wanted = min(len(made.tokens), made.n_computed + tokens)
        covered = kv.back(made, wanted)
        assert all(b >= 0 for b in made.blocks[made.n_computed // SIZE : -(-covered // SIZE)])
        if covered > made.n_computed:
            made.n_computed = covered
            kv.computed(made)
        if made.n_computed == len(made.tokens) and kv.allocate(made, len(made.tokens) + 1):
            made.tokens.append(1)

    @rule(data=st.data(), blocks=st.integers(1, 8))
    def reserve(self, data, blocks: int) -> None:
        debtor, creditor = (self.pick(data, self.books) for _ in range(2))
        if debtor == creditor:
            return
        lender = self.books[creditor]
        before = lender.num_lendable
        granted = lender.lend(debtor, blocks)
        assert len(granted) == min(blocks, before)
        assert lender.lends(debtor, granted)
        self.books[debtor].credit(creditor, granted)

    @rule(data=st.data(), blocks=st.integers(1, 5))
    def begin(self, data, blocks: int) -> None:
        number = self.pick(data, self.books)
        self.flights[number] += self.books[number].begin(blocks)

    @rule(data=st.data())
    def arrive(self, data) -> None:
        number = self.pick(data, self.books)
        if self.flights[number]:
            # To several lenders they go over several connections: in any order.
            lend = self.pick(data, self.flights[number])
            self.flights[number].remove(lend)
            before = list(lend.request.blocks)
            self.books[number].finish(lend)
            after = lend.request.blocks
            if before != after:
                assert after[lend.place] == reference(lend.instance, lend.target)
                assert before[lend.place] == lend.block

    @precondition(lambda self: any(self.requests.values()))
    @rule(data=st.data())
    def end(self, data) -> None:
        number = self.pick(data, [n for n, some in self.requests.items() if some])
        name = self.pick(data, self.requests[number])
        self.books[number].free(self.requests[number].pop(name))

    @rule(data=st.data(), keep=st.integers(0, 4))
    def give_back(self, data, keep: int) -> None:
        number = self.pick(data, self.books)
        self.books[number].spare(keep)
        for creditor, blocks in self.books[number].returns().items():
            self.books[creditor].take_back(number, blocks)

    @rule(data=st.data(), blocks=st.integers(1, 9))
    def recall(self, data, blocks: int) -> None:
        debtor, creditor = (self.pick(data, self.books) for _ in range(2))
        for made in self.books[debtor].recall(creditor, blocks):
            self.books[debtor].free(made)
            del self.requests[debtor][made.id]

    @precondition(lambda self: len(self.books) > 1)
    @rule(data=st.data(), really=st.integers(0, 9))
    def die(self, data, really: int) -> None:
        if really:  # seldom
            return
        gone = self.pick(data, self.books)
        del self.books[gone], self.requests[gone], self.flights[gone]
        for number, kv in self.books.items():
            for made in kv.using(gone):
                kv.free(made)
                del self.requests[number][made.id]
            kv.lost(gone)
            for made in kv.overdrawn():
                kv.free(made)
                del self.requests[number][made.id]
            self.flights[number] = [one for one in self.flights[number] if one.instance != gone]
            assert kv.num_free >= 0

    @invariant()
    def books_agree(self) -> None:
        for number, kv in getattr(self, "books", {}).items():
            kv.check_integrity(self.requests[number])
            for creditor, blocks in kv.borrowed.items():
                assert self.books[creditor].blocks_on_loan[number] == blocks
            for debtor, blocks in kv.blocks_on_loan.items():
                assert self.books[debtor].borrowed[number] == blocks


Several.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSeveral = Several.TestCase


def test_references_name_places() -> None:
    for place in ((0, 0), (3, 17), (1000, 2**31)):
        assert reference(*place) < UNBACKED
        assert place_of(reference(*place)) == place


def test_a_context_spreads_from_its_oldest_block_and_its_newest_stays() -> None:
    kv = DistributedBlocks(4, SIZE)
    kv.credit(1, [5, 6, 7])
    made = request("long", 26)
    assert kv.allocate(made, 26)  # 7 blocks: 4 here, 3 there
    assert not kv.allocate(request("other", 1), 1)
    assert kv.short == 1
    assert made.blocks[4:] == [UNBACKED] * 3
    assert kv.back(made, 26) == 16
    made.n_computed = 16
    lends = kv.begin(9)
    assert [one.place for one in lends] == [0, 1, 2]  # as many as were granted
    own = [one.block for one in lends]
    assert made.blocks[:3] == own  # until they have arrived
    for lend in lends:
        kv.finish(lend)
    assert [place_of(number) for number in made.blocks[:3]] == [(1, 7), (1, 6), (1, 5)]
    assert kv.back(made, 26) == 26
    assert sorted(made.blocks[4:]) == sorted(own)
    kv.free(made)
    assert kv.returns() == {1: [7, 6, 5]}
    assert kv.num_free == 4


def test_a_copy_that_is_early_waits_for_those_before_it() -> None:
    kv = DistributedBlocks(8, SIZE)
    kv.credit(1, [5])
    kv.credit(2, [6])
    made = request("long", 20)
    assert kv.allocate(made, 20)
    made.n_computed = 20
    first, second = kv.begin(2)
    assert {first.instance, second.instance} == {1, 2}
    kv.finish(second)
    assert made.blocks[:2] == [first.block, second.block]
    assert kv.stats()["blocks_moved"] == 0
    kv.check_integrity({"long": made})
    kv.finish(first)
    assert kv.stats()["blocks_moved"] == 2
    assert all(number < UNBACKED for number in made.blocks[:2])
    kv.check_integrity({"long": made})

    # Its request ends first: nobody tells of it again, and both blocks come back.
    kv.credit(1, [7])
    kv.credit(2, [8])
    made.n_computed = 20
    late, early = kv.begin(2)
    kv.finish(early)
    kv.free(made)
    kv.check_integrity({})
    kv.finish(late)
    assert {one: sorted(blocks) for one, blocks in kv.returns().items()} == {1: [5, 7], 2: [6, 8]}
    assert kv.num_free == 8


def test_one_who_borrows_does_not_lend_and_one_who_lends_keeps_some() -> None:
    kv = DistributedBlocks(10, SIZE, watermark=3)
    assert len(kv.lend(1, 99)) == 7
    assert kv.lend(2, 1) == []
    kv = DistributedBlocks(10, SIZE)
    kv.credit(2, [4])
    assert kv.num_lendable == 0
    assert kv.lend(1, 1) == []


def test_as_many_lenders_as_are_allowed() -> None:
    kv = DistributedBlocks(8, SIZE, max_lenders=2)
    for instance in range(1, 5):
        kv.credit(instance, [0])
    made = request("long", 33)
    assert kv.allocate(made, 33)
    kv.back(made, 32)
    made.n_computed = 32
    assert len({one.instance for one in kv.begin(4)}) == 2


def beats(*some: InstanceStatus) -> LoanRegistry:
    registry = LoanRegistry(len(some), SIZE, Linear(), timeout_s=3.0)
    for beat in some:
        registry.beat(beat, 0.0)
    return registry


def test_ledger_adds_up_to_nothing_and_forgets_the_lost() -> None:
    registry = beats(
        InstanceStatus(instance=0, borrowed={1: 5, 2: 3}),
        InstanceStatus(instance=1),
        InstanceStatus(instance=2, borrowed={}),
    )
    assert registry.balances() == {0: -8, 1: 5, 2: 3}
    assert registry.lose(1) == [0]
    assert registry.debts == [Loan(0, 2, 3)]
    assert sum(registry.balances().values()) == 0
    registry.beat(InstanceStatus(instance=1), 1.0)  # a word that comes late
    assert 1 not in registry.instances


def test_silence_is_noticed_by_the_time_that_is_told() -> None:
    registry = beats(InstanceStatus(instance=0), InstanceStatus(instance=1))
    registry.beat(InstanceStatus(instance=0), 2.0)
    assert registry.silent(3.0) == []
    assert registry.silent(3.5) == [1]
    assert LoanRegistry(2, SIZE, Linear()).silent(99.0) == []  # they are still starting


def test_loans_go_to_who_gains_most_from_who_loses_least() -> None:
    busy, idle = (100,) * 8, ()
    registry = beats(
        InstanceStatus(instance=0, short=10, waiting=60, contexts=(50,)),
        InstanceStatus(instance=1, lendable=20, contexts=busy),
        InstanceStatus(instance=2, lendable=6, contexts=idle),
    )
    assert registry.loans() == [Loan(0, 2, 6), Loan(0, 1, 4)]
    # Not even all together let the request in: nothing is lent in part.
    registry.beat(InstanceStatus(instance=0, short=30, waiting=120), 0.0)
    assert registry.loans() == []


def test_near_lenders_come_first() -> None:
    registry = beats(
        InstanceStatus(instance=0, short=5, waiting=20, node="a"),
        InstanceStatus(instance=1, lendable=9, node="b"),
        InstanceStatus(instance=2, lendable=9, node="a", contexts=(9,)),
    )
    assert [debt.creditor for debt in registry.loans()] == [2]


def test_nothing_is_lent_when_the_sum_gets_worse() -> None:
    # A huge context for one request more, at a lender that generates for many.
    registry = beats(
        InstanceStatus(instance=0, short=9000, waiting=37000, contexts=(10,) * 8),
        InstanceStatus(instance=1, lendable=9000, contexts=(10,) * 60),
    )
    assert registry.loans() == []
    assert throughput(Linear(), (10,) * 60, 36000) < throughput(Linear(), (10,) * 60) / 5


def test_who_owes_each_other_is_told_to_end_the_smaller_debt() -> None:
    registry = beats(
        InstanceStatus(instance=0, borrowed={1: 5}), InstanceStatus(instance=1, borrowed={0: 2})
    )
    assert registry.recalls() == [Loan(1, 0, 2)]
    # A chain: 0 owes 1, which owes 2. What 1 lends comes back, as much as it has borrowed.
    chain = beats(
        InstanceStatus(instance=0, borrowed={1: 4}),
        InstanceStatus(instance=1, borrowed={2: 3}),
        InstanceStatus(instance=2),
    )
    assert chain.recalls() == [Loan(0, 1, 4)]
    assert (
        beats(InstanceStatus(instance=0, borrowed={1: 4}), InstanceStatus(instance=1)).recalls()
        == []
    )


def test_who_needs_more_than_there_is_is_told_how_much_is_missing() -> None:
    registry = beats(InstanceStatus(instance=0), InstanceStatus(instance=1))
    registry.require_room("r", 24, 3, 3)
    with pytest.raises(ServeError, match=r"r: 25 tokens .* need 7 blocks.* 1 blocks are missing"):
        registry.require_room("r", 25, 3, 3)


@pytest.mark.parametrize(
    "options",
    [{"instances": 0}, {"watermark": 1.0}, {"max_lenders": 0}, {"host_tokens": 3}, {"beat_s": 0}],
)
def test_wrong_options_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=f"distributed.{next(iter(options))}"):
        Distributed(**options)


def test_alone_it_is_a_paged_cache_for_any_scheduler() -> None:
    kv = table("kv").build({"name": "distributed", "block_size": SIZE}).build(64)
    limits = SchedulerLimits(max_running=4, max_step_tokens=16, max_position=128)
    scheduler = table("scheduler").build({"name": "fcfs"}).build(kv, limits)
    with pytest.raises(ServeError, match="tokens to keep in the cache"):
        scheduler.add(Request("r", [1] * 60, 60, SamplingParams(max_tokens=9)))
    made = request("r", 20)
    scheduler.add(made)
    step = scheduler.plan(0.0)
    assert [(chunk.start, chunk.length) for chunk in step.chunks] == [(0, 16)]
    assert min(made.blocks) >= 0
    scheduler.lose(made)
    assert (made.state, made.blocks, scheduler.num_waiting) == ("waiting", [], 1)


def test_a_step_that_is_cut_to_its_memory_is_otherwise_the_same() -> None:
    kv = DistributedBlocks(8, SIZE)
    limits = SchedulerLimits(max_running=4, max_step_tokens=64, max_position=128)
    borrower = Borrower(Fcfs().build(kv, limits), kv, 0)
    whole, part, nothing = (Chunk(request(name, 20), 4, 16) for name in "abc")
    step = Step((whole, part, nothing), wait_for=(3,), at=2.0, moves=(Copy(0, 1, 2),), scrub=(5,))
    room = {"a": 20, "b": 9, "c": 4}
    fitted = borrower.fit(step, lambda one, stop: room[one.id])
    assert fitted == replace(step, chunks=(whole, Chunk(part.request, 4, 5)))


# -- the same objects on a virtual clock ------------------------------------------------


def fleet(lend: bool, *, tokens: int = 160, long: int = 120):
    shorts = [Arrival(0.0, (1,) * 8, 24) for _ in range(9)]
    return simulate_lending(
        Distributed(instances=3, block_size=SIZE, prefix_reuse=False),
        tokens,
        Fcfs(),
        SchedulerLimits(max_running=16, max_step_tokens=32, max_position=1024),
        LendingStepCost(cost=Linear(), layers=2, hop_s=1e-3, block_s=1e-3),
        [*shorts, Arrival(0.0, (1,) * long, 16)],
        lend=lend,
    )


def test_in_simulation_a_long_request_need_not_give_way() -> None:
    alone, lending = fleet(False), fleet(True)
    for seen in (alone, lending):
        assert [one.n_output for one in seen.served] == [24] * 9 + [16]
    assert alone.served[-1].preemptions >= 1
    assert lending.served[-1].preemptions == 0
    assert (alone.blocks_moved, alone.helped_tokens) == (0, 0)
    assert lending.blocks_moved > 0
    assert lending.tokens_computed < alone.tokens_computed
    assert lending.served[-1].finish < alone.served[-1].finish


def test_in_simulation_a_context_longer_than_an_instance_is_served_by_three() -> None:
    alone, lending = fleet(False, long=400), fleet(True, long=400)
    assert alone.refused == ["9"]
    assert lending.refused == []
    assert lending.served[-1].n_output == 16
    assert fleet(True, long=480).refused == ["9"]


def test_a_step_waits_for_the_slower_side_and_for_messages() -> None:
    cost = LendingStepCost(cost=Linear(), layers=2, hop_s=0.01)
    assert cost.spread([(100, 1)], [{}]) == (pytest.approx(1.15), {})
    seconds, there = cost.spread([(100, 1)], [{1: 60, 2: 20}])
    assert there == {1: pytest.approx(0.06), 2: pytest.approx(0.02)}
    assert seconds == pytest.approx(1.05 + 0.06 + 0.02)  # 20 here take less than 60 there
    assert cost.attend(60) == pytest.approx(0.06)
    with pytest.raises(ConfigError, match="hop_s"):
        LendingStepCost(cost=Linear(), hop_s=-1.0)
