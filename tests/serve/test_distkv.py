"""Instances that lend each other memory: the tokens of one engine, and nothing hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.plan.batching.cache.loans import LoanRegistry  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402
from shoal.serve.cluster.distkv import DistKVEngine, EvenCost  # noqa: E402
from shoal.serve.cluster.distkv_instance import DistKVInstance  # noqa: E402
from shoal.serve.cluster.lending import LenderClient, LenderLostError  # noqa: E402

BLOCKS = 12  # of an instance, 8 tokens each; one of them is not lent


@pytest.fixture(scope="module")
def model_dir(random_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model") / "m"
    huggingface.write(where, random_model())
    return where


def job(model_dir: Path, **options: object) -> ServeJob:
    kv = {"name": "distributed", "instances": 3, "block_size": 8, **options}
    return ServeJob.model_validate(
        {
            "model": str(model_dir),
            "kv": kv,
            "kv_tokens": BLOCKS * 8,
            "max_running": 8,
            "max_step_tokens": 32,
            "threads": 1,
        }
    )


def request(number: int, length: int, new: int) -> Request:
    source = generator(7, purpose="prompts", index=number)
    prompt = source.integers(0, 160, length).tolist()
    return Request(f"r{number}", prompt, length, SamplingParams(max_tokens=new))


def drain(engine: DistKVEngine, most: int = 10_000) -> None:
    for _ in range(most):
        if not engine.num_open:
            return
        engine.step(5.0)
    raise AssertionError("requests that never end")


def wanted(random_model, engine_for, serve_all, some: list[Request]) -> list[list[int]]:
    engine = engine_for(random_model(), max_step_tokens=32)
    return serve_all(engine, [list(one.tokens) for one in some], [one.params for one in some])


class Said:
    """Stands at the other end of an instance in this process."""

    def send(self, message: dict[str, object]) -> None:
        self.last = message


@pytest.fixture
def near(model_dir, tmp_path):
    """Number and options -> instances in this process, connected through their sockets."""
    made: list[DistKVInstance] = []

    def start(count: int = 2, **options: object) -> list[DistKVInstance]:
        described = job(model_dir, instances=count, **options).model_dump(mode="json")
        all_ = count + bool(options.get("host_tokens"))
        for number in range(all_):
            words = {"job": described, "instance": number, "directory": str(tmp_path)}
            made.append(DistKVInstance({**words, "dtype": "fp32"}, Said()))
        for one in made[:count]:
            paths = [[n, str(tmp_path / f"lender{n}")] for n in range(all_) if n != one.number]
            one.handle({"kind": "peers", "paths": paths})
            one.handle({"kind": "room", "blocks": 11 * (count - 1)})
        return made

    yield start
    for one in made:
        one.close()


@pytest.fixture
def meet(near, tmp_path):
    """Connect to the first of two instances as the second, again and again."""
    first, _ = near()
    made: list[LenderClient] = []

    def connect(**other: object) -> LenderClient:
        form = {**first.form, **other}
        made.append(LenderClient(0, str(tmp_path / "lender0"), 1, form, timeout_s=5.0))
        return made[-1]

    connect.first = first
    yield connect
    for one in made:
        one.close()


def run(instances: list[DistKVInstance], registry: LoanRegistry, steps: int = 2_000) -> None:
    """All of them in turn, with the registry's advice, until nobody has anything to do."""
    for _ in range(steps):
        for one in instances:
            one.engine.step() if one.engine.busy else one.lending.settle()
            registry.beat(one.lending.beat(), 0.0)
        for debt in registry.recalls():
            words = {"kind": "recall", "creditor": debt.creditor, "blocks": debt.blocks}
            instances[debt.debtor].handle(words)
        for debt in registry.loans():
            loans = [[debt.creditor, debt.blocks]]
            instances[debt.debtor].handle({"kind": "loans", "loans": loans})
        check(instances)
        if not any(one.engine.busy or one.kv.borrowed for one in instances):
            return
    raise AssertionError("requests that never end, or debts")


def check(instances: list[DistKVInstance]) -> None:
    for one in instances:
        with one._lock:
            one.kv.check_integrity(one.engine.scheduler.requests)


def test_parts_of_a_context_at_others_give_the_same_tokens(
    near, random_model, engine_for, serve_all
) -> None:
    made = [request(0, 150, 20), *(request(number, 20, 20) for number in range(1, 6))]
    want = wanted(random_model, engine_for, serve_all, made)
    some = near(3)
    for one in made:
        some[0].engine.scheduler.add(one)
    run(some, LoanRegistry(3, 8, EvenCost()))
    assert [one.tokens[one.n_prompt :] for one in made] == want
    stats = some[0].engine.stats()
    assert stats["helped_tokens_total"] > 0
    # A query of 4 heads of 16 in fp32 out, and 4 records of 18 back, in each of 2 layers: once
    # for each lender, of which a request has one or two.
    least = 2 * 4 * (16 + 18) * 4 * stats["helped_tokens_total"]
    assert least <= stats["helped_bytes_total"] <= 2 * least
    assert stats["helped_bytes_total"] < 0.2 * stats["spared_bytes_total"]
    assert stats["lend_bytes_total"] == stats["blocks_moved"] * 8 * 512
    assert [one.kv.blocks_on_loan for one in some] == [{}, {}, {}]


def test_who_borrows_and_lends_at_once_is_resolved(
    near, random_model, engine_for, serve_all
) -> None:
    made = [request(0, 110, 12), request(1, 110, 12)]
    want = wanted(random_model, engine_for, serve_all, made)
    some = near()
    registry = LoanRegistry(2, 8, EvenCost())
    # Both act on old news: each reserves at the other before either has used anything.
    granted = [some[1].kv.lend(0, 5), some[0].kv.lend(1, 5)]
    for one, blocks, creditor in zip(some, granted, (1, 0), strict=True):
        one.kv.credit(creditor, blocks)
    for one, result in zip(some, made, strict=True):
        one.engine.scheduler.add(result)
        one.engine.step()
        registry.beat(one.lending.beat(), 0.0)
    assert {(debt.debtor, debt.creditor) for debt in registry.debts} == {(0, 1), (1, 0)}
    run(some, registry)
    assert [one.tokens[one.n_prompt :] for one in made] == want


def test_a_lender_of_another_model_or_cache_is_refused(meet, tmp_path) -> None:
    for name, other in (("block_size", 16), ("dtype", "torch.bfloat16"), ("layers", 9)):
        with pytest.raises(ServeError, match=f"{name} {other!r}"):
            meet(**{name: other})
    with pytest.raises(LenderLostError, match="instance 7"):
        LenderClient(7, str(tmp_path / "nobody"), 1, meet.first.form, timeout_s=5.0)


def test_blocks_that_were_not_lent_are_neither_read_nor_written(meet, random_model) -> None:
    cache = PagedCache(random_model().config, 2, 8)
    with pytest.raises(ServeError, match="not lent"):
        meet().put(cache, [0], [3])
    lender = meet()
    lender.plan([[3]], [0])
    with pytest.raises(LenderLostError):
        lender.ask(0, torch.zeros(1, 4, 16))
        lender.answer(torch.empty(1, 4, 18))
    lender = meet()
    (block,) = lender.reserve(1)
    cache.stores[0][:, :, :8] = 7.0
    assert lender.put(cache, [0], [block]) == 8 * 512
    assert bool((meet.first.engine.runner.cache.blocks[0][:, :, block] == 7.0).all())
    lender.release([block])
    assert len(lender.reserve(99)) == 11
    assert meet.first.kv.num_lendable == 0


def test_a_host_lends_memory_and_computes_no_request(
    near, random_model, engine_for, serve_all
) -> None:
    made = [request(0, 350, 10)]
    want = wanted(random_model, engine_for, serve_all, made)
    one, host = near(1, host_tokens=400)
    assert host.engine is None
    one.handle({"kind": "room", "blocks": 50})
    one.engine.scheduler.add(made[0])
    for _ in range(1_000):
        one.engine.step()
        short = one.lending.beat().short + one.lending.beat().ahead
        one.handle({"kind": "loans", "loans": [[1, short]]})
        if not one.engine.busy:
            break
    one.lending.settle()
    assert [one.tokens[one.n_prompt :] for one in made] == want
    assert one.engine.stats()["blocks_moved"] >= 360 // 8 - BLOCKS
    assert one.kv.borrowed == {}
    with pytest.raises(ServeError, match="room or lost"):
        host.handle({"kind": "add"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"exact": True}, "exact"), ({"preempt": "swap"}, "preempt"), ({"parallel": {"tp": 2}}, "tp")],
)
def test_what_does_not_go_together_is_refused(model_dir, changes, named) -> None:
    fields = {**job(model_dir).model_dump(mode="json"), **changes}
    with pytest.raises((ConfigError, ServeError), match=named):
        DistKVEngine(ServeJob.model_validate(fields))


@pytest.mark.slow
def test_a_context_of_all_memory_gives_the_tokens_of_one_engine(
    model_dir, random_model, engine_for, serve_all
) -> None:
    # 12 own blocks, and 11 of each of two others: 34 blocks, and the last token is never kept.
    made = [request(0, 250, 23), *(request(number, 20, 30) for number in range(1, 9))]
    want = wanted(random_model, engine_for, serve_all, made)
    with DistKVEngine(job(model_dir)) as several:
        assert len({*several.pids.values(), os.getpid()}) == 4
        for one in made:
            several.add(one)
        drain(several)
        assert (several.losses, several.drain_events()) == ([], [])
        assert [one.tokens[one.n_prompt :] for one in made] == want
        several.step(1.5)
        stats = several.stats()
        assert stats["helped_tokens_total"] > 0
        assert stats["blocks_moved"] >= 22
        with pytest.raises(ServeError, match="1 blocks are missing"):
            several.add(request(20, 250, 24))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_instance_that_is_killed_while_it_lends_or_borrows_costs_no_token(
    model_dir, random_model, engine_for, serve_all, victim: int
) -> None:
    made = [request(0, 120, 40), *(request(number, 20, 12) for number in range(1, 5))]
    want = wanted(random_model, engine_for, serve_all, made)
    with DistKVEngine(job(model_dir, timeout_s=20.0)) as several:
        for one in made:
            several.add(one)
        # Either of them may have got the long request.
        while not (debts := several.registry.debts) or made[0].n_generated <= 5:
            assert made[0].n_generated < 40, "the long request ended without a loan"
            several.step(5.0)
        creditor, debtor = debts[0].creditor, debts[0].debtor
        os.kill(several.pids[f"instance {(debtor, creditor)[victim]}"], signal.SIGKILL)
        drain(several)
        assert (len(several.losses), several.drain_events()) == (1, []), several.losses
        assert [one.tokens[one.n_prompt :] for one in made] == want
        assert sum(several.registry.balances().values()) == 0


@pytest.mark.slow
@pytest.mark.multi
def test_two_instances_that_are_killed_at_once_leave_all_requests_to_the_third(
    model_dir, random_model, engine_for, serve_all
) -> None:
    made = [request(number, 20, 12) for number in range(9)]  # three at each instance
    want = wanted(random_model, engine_for, serve_all, made)
    with DistKVEngine(job(model_dir, timeout_s=20.0)) as several:
        for one in made:
            several.add(one)
        for number in (0, 1):
            os.kill(several.pids[f"instance {number}"], signal.SIGKILL)
        drain(several)
        assert several.drain_events() == []
        assert [one.tokens[one.n_prompt :] for one in made] == want
        assert len(several.losses) == 2
