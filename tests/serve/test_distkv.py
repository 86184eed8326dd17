"""Instances that lend each other memory: the tokens of one engine, and nothing hangs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.serve.distkv import DistKVEngine  # noqa: E402

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
        assert (several.losses, several.told()) == ([], [])
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
        while not (made[0].n_generated > 5 and several.ledger.debts):
            several.step(5.0)
        creditor = several.ledger.debts[0].creditor
        debtor = several.ledger.debts[0].debtor
        assert debtor == 0
        os.kill(several.pids[f"instance {(debtor, creditor)[victim]}"], signal.SIGKILL)
        drain(several)
        assert several.told() == []
        assert len(several.losses) == 1
        assert [one.tokens[one.n_prompt :] for one in made] == want
        assert sum(several.ledger.balances().values()) == 0


@pytest.mark.slow
def test_a_host_lends_memory_and_computes_no_request(
    model_dir, random_model, engine_for, serve_all
) -> None:
    made = [request(0, 350, 10)]
    want = wanted(random_model, engine_for, serve_all, made)
    with DistKVEngine(job(model_dir, instances=1, host_tokens=400)) as several:
        assert list(several.pids) == ["instance 0", "host lender"]
        several.add(made[0])
        drain(several)
        assert [one.tokens[one.n_prompt :] for one in made] == want
        assert several.stats()["blocks_moved"] >= 360 // 8 - BLOCKS
