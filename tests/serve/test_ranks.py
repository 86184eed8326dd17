"""Ranks that share a model give the tokens of one process, in whatever order commands come."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import thread_engine  # noqa: E402

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import ModelError, RankError, ServeError, ShoalError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob, Step, StepResult, TokenInfo  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.parameters import Parameters  # noqa: E402
from shoal.serve.ranks.boundary import RankBoundary  # noqa: E402
from shoal.serve.ranks.commands import (  # noqa: E402
    CommandQueue,
    CommandReader,
    CommandWriter,
    pack_result,
    unpack_result,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral")
SPLITS = ((2, 1), (1, 2), (2, 2))


def job(tp=1, pp=1, *, model="tiny", **changes):
    parallel = {"tp": tp, "pp": pp, **changes.pop("parallel", {})}
    fields = {
        "model": model, "kv_tokens": 4096, "threads": 1, "max_step_tokens": 48, "max_running": 8,
    }  # fmt: skip
    return ServeJob.model_validate({**fields, "parallel": parallel, **changes})


def prompts(count=10):
    """Every third one begins as the one before."""
    made = []
    for number in range(count):
        source = generator(3, purpose="prompts", index=number)
        prompt = source.integers(0, 160, int(source.integers(1, 100))).tolist()
        if number % 3 == 2:
            prompt[:40] = made[-1][:40]
        made.append(prompt)
    return made


def params(count=10):
    """Greedy ones, sampled ones, penalties and log probabilities."""
    return [
        SamplingParams(
            max_tokens=4 + 3 * number,
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            logprobs=2 if number % 4 == 0 else None,
            repetition_penalty=1.2 if number % 5 == 1 else 1.0,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_tokens_of_two_by_two_ranks_in_any_order_of_commands(
    random_model, engine_for, serve_all, shuffle
):
    model = random_model()
    want = serve_all(engine_for(model, max_step_tokens=48), prompts(), params())
    engine, ranks = thread_engine(
        job(2, 2, parallel={"in_flight": 4}), random_model(), shuffle=shuffle
    )
    assert serve_all(engine, prompts(), params()) == want
    assert engine.stats()["blocks_used"] == 0
    # Again, from the cache: the ranks are told the blocks, not the tokens' states.
    assert serve_all(engine, prompts(), params()) == want
    assert engine.stats()["prefix_hit_tokens"] > 0
    ranks.close()
    # Commands hold numbers alone: at most each token of a request once, and its blocks.
    sent = [one for command in ranks.commands for one in command["requests"]]
    assert len(sent) == 20
    assert max(len(one["tokens"]) for one in sent) == max(map(len, prompts()))
    later = [len(chunk[3]) for command in ranks.commands for chunk in command["chunks"]]
    assert max(later) == 1


def test_several_steps_are_under_way(random_model):
    engine, ranks = thread_engine(job(1, 2, parallel={"in_flight": 3}), random_model())
    for number in range(6):
        engine.add(Request(f"r{number}", [number, 5], 2, SamplingParams(max_tokens=9)))
    deepest = 0
    while engine.busy:
        engine.step()
        deepest = max(deepest, len(engine._under_way))
    ranks.close()
    assert deepest == 2  # three, less the one that a step commits
    assert max(len(command["chunks"]) for command in ranks.commands[1:]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_split_gives_the_tokens_of_one_process(family, random_model, engine_for, serve_all):
    want = serve_all(engine_for(random_model(family)), prompts(), params())
    cuts = (
        {},
        {"scheduler": {"name": "fcfs", "chunked": False}, "max_step_tokens": 200},
        {"kv": {"name": "paged", "prefix_reuse": False, "block_size": 1}, "kv_tokens": 200},
        {"scheduler": "static"},
        {"scheduler": "prefill_first"},
    )
    preempted = 0
    for tp, pp in SPLITS:
        for cut in cuts:
            engine, ranks = thread_engine(job(tp, pp, **cut), random_model(family))
            assert serve_all(engine, prompts(), params()) == want, (tp, pp, cut)
            preempted += engine.stats()["preemptions_total"]
            ranks.close()
    assert preempted


def test_more_ranks_than_key_heads_and_biases_of_every_layer(random_model, engine_for, serve_all):
    base = random_model("qwen2").config
    config = base.model_copy(
        update={"num_layers": 3, "output_bias": True, "ffn_bias": True, "vocab_size": 157}
    ).model_copy(update={"family": "llama"})
    short = [[token % 157 for token in prompt] for prompt in prompts(6)]
    want = serve_all(engine_for(random_model(config)), short, params(6))
    engine, ranks = thread_engine(job(4, 2), random_model(config))
    assert serve_all(engine, short, params(6)) == want
    ranks.close()


def test_what_cannot_be_shared(random_model):
    config = random_model().config
    from shoal.serve.ranks.part import check_parts

    for changes, message in (
        ({"tp": 3}, "parallel.tp = 3: expected a divisor of num_heads = 4"),
        ({"pp": 3}, "parallel.pp = 3: expected at most 2, the layers"),
        ({"tp": 2, "disagg": {"prefill": 1}}, "disagg"),
        ({"tp": 2, "preempt": "auto"}, "preempt = "),
        ({"pp": 2, "preempt": "swap"}, "preempt = "),
        ({"tp": 2, "weights": "int4-g128"}, "weights = "),
        ({"tp": 2, "kv_format": {"name": "bfp", "ksort": "pairs"}}, "kv_format = "),
    ):
        with pytest.raises(ShoalError, match=message):
            check_parts(job(**changes), config)


def test_an_inbox_gives_commands_in_the_order_of_tickets():
    inbox = CommandQueue(3)
    for ticket in (2, 0, 1):
        inbox.put({"kind": "step", "ticket": ticket})
    with pytest.raises(RankError, match="command 3: 3 others wait"):
        inbox.put({"kind": "step", "ticket": 3})
    taken = [inbox.take()["ticket"]]
    assert inbox.following()["ticket"] == 1
    taken += [inbox.take()["ticket"], inbox.take()["ticket"]]
    assert taken == [0, 1, 2]
    assert inbox.following() is None
    with pytest.raises(RankError, match="came twice"):
        inbox.put({"kind": "step", "ticket": 1})
    inbox.put({"kind": "stop", "ticket": 3})
    assert inbox.take() is None
    inbox.close(ServeError("gone"))
    with pytest.raises(ServeError, match="gone"):
        inbox.take()


def test_commands_tell_what_is_new():
    writer, reader = CommandWriter(), CommandReader()
    request = Request("a", [1, 2, 3], 3, SamplingParams(max_tokens=9), blocks=[4])
    from shoal.ir import Chunk

    def through(start, length):
        step = reader.step(writer.command(Step((Chunk(request, start, length),))))
        (chunk,) = step.chunks
        assert (chunk.start, chunk.length) == (start, length)
        assert chunk.request.tokens == request.tokens
        assert chunk.request.blocks == request.blocks
        assert chunk.request.params == request.params
        return chunk.request

    first = through(0, 2)
    request.blocks.append(7)
    through(2, 1)
    request.tokens.append(9)
    assert through(3, 1) is first
    request.blocks = [8, 9]  # it was preempted
    through(0, 4)
    request.state = "finished"
    command = writer.command(Step(()))
    assert command["over"] == ["a"]
    scored = {"c": (5, (TokenInfo(-0.5, ((7, -0.25),)), TokenInfo(-1.0)))}
    result = StepResult({"a": (3,)}, vectors={"a": [0.5]}, failed={"b": "no"}, seconds=0.5)
    result.prompts = scored
    assert unpack_result(pack_result(0, result)) == result


def test_states_of_another_step_are_refused():
    def work(comm):
        boundary = RankBoundary(comm, 4, torch.float32)
        if comm.rank == 0:
            boundary.send(7, torch.ones(2, 4))
        else:
            boundary.take(8, 2)

    with pytest.raises(RankError, match="sent step 7 of 2 tokens, and step 8"):
        run_ranks(2, work)


def test_a_sender_that_blocks_waits_for_its_receiver_over_a_link():
    def work(comm):
        boundary = RankBoundary(comm, 4, torch.float32, blocking=True, latency_s=0.002)
        for ticket in range(3):
            if comm.rank == 0:
                boundary.send(ticket, torch.full((2, 4), ticket, dtype=torch.float32))
            else:
                assert boundary.take(ticket, 2).tolist() == [[ticket] * 4] * 2

    began = time.monotonic()
    run_ranks(2, work)
    assert time.monotonic() - began >= 0.006


def test_parameters_of_packed_weights_are_refused(tmp_path, random_model):
    huggingface.write(tmp_path / "m", random_model())
    assert Parameters(tmp_path / "m").dtype == torch.float32
    path = tmp_path / "m" / "config.json"
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": packed}))
    with pytest.raises(ModelError, match="packed weights"):
        Parameters(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.multi
def test_real_ranks_give_the_same_tokens_and_one_that_is_killed_is_told(
    random_model, engine_for, serve_all, tmp_path
):
    from shoal.serve.ranks.workers import ranked_engine

    model = random_model("qwen3")
    huggingface.write(tmp_path / "m", model)
    want = serve_all(engine_for(model, max_step_tokens=48), prompts(), params())
    engine = ranked_engine(job(2, 2, model=str(tmp_path / "m")), model.config)
    try:
        pids = engine.ranks.pids
        assert len({*pids, os.getpid()}) == 5
        assert serve_all(engine, prompts(), params()) == want
        assert not engine.busy
        for number in range(3):
            engine.add(Request(f"late{number}", [1, 2], 2, SamplingParams(max_tokens=400)))
        engine.step()
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 of 4.*killed by SIGKILL.*requests"):
            while engine.busy:
                engine.step()
        assert time.monotonic() - began < 5
        assert engine.busy  # so that whoever owns it asks, and is told
    finally:
        engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.multi
def test_a_rank_that_cannot_load_is_told(tmp_path, random_model):
    from shoal.serve.ranks.workers import ranked_engine

    with pytest.raises(ModelError, match=r"rank \d of 2.*no such directory"):
        ranked_engine(job(2, model=str(tmp_path / "none")), random_model().config)
