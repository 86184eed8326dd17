"""Several answers to one prompt: the prompt is computed once, and blocks are copied on write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import thread_engine  # noqa: E402

from shoal.cost.serving.simulator import SimulatedRunner  # noqa: E402
from shoal.cost.step_cost.fitted import FittedStepCost  # noqa: E402
from shoal.ir import Request, SamplingParams, SchedulerLimits, ServeJob  # noqa: E402
from shoal.plan.batching import KV_MANAGERS, SCHEDULERS  # noqa: E402
from shoal.plan.batching.cache.paged import Paged  # noqa: E402
from shoal.plan.batching.schedulers.fcfs import Fcfs  # noqa: E402

PROMPT = [(7 * place + place // 3) % 150 for place in range(45)]  # 2 blocks of 16, and 13 tokens


def answers(count, prompt=PROMPT, *, forked=True, **changes):
    """Requests for so many sampled answers to a prompt."""
    made = []
    for choice in range(count):
        params = SamplingParams(
            **{"max_tokens": 12, "temperature": 1.0, "seed": choice, "frequency_penalty": 0.3}
            | changes
        )
        parent = "a0" if forked and choice else None
        made.append(Request(f"a{choice}", list(prompt), len(prompt), params, fork_of=parent))
    return made


def serve(engine, requests, *, late=()):
    """Tokens of all, and their log probabilities; those of ``late`` come a few steps later."""
    for request in requests:
        engine.add(request)
    infos = {}
    for number in range(10_000):
        if number == 3:
            for request in late:
                engine.add(request)
        for output in engine.step():
            infos.setdefault(output.request_id, []).extend(output.infos)
        if not engine.busy:
            break
    return [(one.tokens[one.n_prompt :], infos.get(one.id)) for one in (*requests, *late)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_step_tokens": 16},
        {"kv": {"name": "paged", "prefix_reuse": False}},
        {"kv": {"name": "paged", "block_size": 1}},
        {"scheduler": "prefill_first"},
        {"scheduler": {"name": "fair", "policy": "uniform", "frequency": 0.3}},
    ],
    ids=str,
)
def test_forks_get_what_separate_requests_get(fields, random_model, engine_for):
    model = random_model("qwen2")
    alone = engine_for(model, **{"max_running": 1, **fields})
    want = serve(alone, answers(5, forked=False, logprobs=2))
    engine = engine_for(model, **fields)
    result = serve(engine, answers(5, logprobs=2))
    assert [tokens for tokens, _ in result] == [tokens for tokens, _ in want]
    assert len({tuple(tokens) for tokens, _ in result}) == 5
    stats = engine.stats()
    assert stats["tokens_prompt_total"] == len(PROMPT) + 4
    assert stats["forks_total"] == 4
    whole_blocks = "kv" in fields and fields["kv"].get("block_size") == 1
    assert stats["blocks_copied_total"] == (0 if whole_blocks else 4)
    assert stats["blocks_used"] == 0


@pytest.mark.parametrize(("length", "copied"), [(1, 0), (2, 1), (16, 1), (17, 0), (18, 1)])
def test_a_block_is_copied_only_where_the_last_token_is_written(
    length, copied, random_model, engine_for
):
    engine = engine_for(random_model())
    want = serve(engine_for(random_model()), answers(3, PROMPT[:length], forked=False))
    assert serve(engine, answers(3, PROMPT[:length])) == want
    assert engine.stats()["blocks_copied_total"] == 2 * copied
    assert engine.stats()["tokens_prompt_total"] == length + 2


def test_forks_that_come_late_find_no_room_or_lose_their_first(random_model, engine_for):
    model = random_model()
    want = [tokens for tokens, _ in serve(engine_for(model), answers(6, forked=False))]

    def tokens(engine, *asked, **more):
        return [found for found, _ in serve(engine, *asked, **more)]

    requests = answers(6)
    late = engine_for(model)
    assert tokens(late, requests[:2], late=requests[2:]) == want
    assert late.stats()["forks_total"] == 5
    narrow = engine_for(model, max_running=2)
    assert tokens(narrow, answers(6)) == want
    assert narrow.stats()["blocks_used"] == 0
    tight = engine_for(model, kv_tokens=112, max_position=96)
    assert tokens(tight, answers(6)) == want
    assert tight.stats()["preemptions_total"] > 0
    # The first is aborted before its prompt is computed, a fork while it stands aside.
    left = engine_for(model, max_step_tokens=16)
    requests = answers(6)
    for request in requests:
        left.add(request)
    left.step()
    assert left.stats()["requests_waiting"] == 5
    left.abort("a0")
    left.step()
    left.abort("a5")
    while left.busy:
        left.step()
    assert [one.tokens[one.n_prompt :] for one in requests[1:5]] == want[1:5]
    assert left.stats()["blocks_used"] == left.stats()["requests_waiting"] == 0


def test_only_the_same_prompt_of_the_same_user_is_forked(random_model, engine_for):
    model = random_model()
    first, *others = answers(4)
    others[0].tokens[3] += 1
    others[1].salt = "other"
    others[2].fork_of = "nobody"
    engine = engine_for(model)
    serve(engine, [first, *others])
    assert engine.stats()["forks_total"] == 0


def test_ranks_copy_their_part_of_a_block(random_model, engine_for):
    model = random_model("qwen3")
    want = [tokens for tokens, _ in serve(engine_for(model), answers(4, forked=False))]
    for split in ({"tp": 2}, {"tp": 2, "pp": 2}):
        job = ServeJob.model_validate(
            {"model": "tiny", "kv_tokens": 4096, "threads": 1, "parallel": split}
        )
        engine, ranks = thread_engine(job, model)
        assert [tokens for tokens, _ in serve(engine, answers(4))] == want
        assert engine.stats()["tokens_prompt_total"] == len(PROMPT) + 3
        assert engine.stats()["blocks_copied_total"] == 3
        ranks.close()


def test_the_simulator_drives_the_same_forks():
    limits = SchedulerLimits(max_running=8, max_step_tokens=64, max_position=96)
    kv = Paged().build(4096)
    scheduler = Fcfs().build(kv, limits)
    runner = SimulatedRunner(
        FittedStepCost(step=1e-3, token=1e-4, prompt_pair=0, decode_key=0, chunk=0)
    )
    for request in answers(5):
        scheduler.add(request)
    tokens, now, moves = 0, 0.0, []
    while scheduler.num_running or scheduler.num_waiting:
        step = scheduler.plan(now)
        kv.check_integrity(scheduler.running)
        if scheduler.num_running == 5 and not moves:
            shared = set.intersection(*(set(one.blocks) for one in scheduler.running.values()))
            assert len(shared) == 2, "the full blocks of the prompt"
        moves += step.moves
        result = runner.execute(step)
        tokens, now = tokens + step.num_tokens, now + result.seconds
        scheduler.commit(step, result, now)
    assert tokens == len(PROMPT) + 4 + 5 * 11
    assert len(moves) == 4
    assert len({move.source for move in moves}) == 1
    assert kv.num_free == kv.num_blocks


@pytest.mark.parametrize("kv", ["blockgroups", "contiguous", "slots"])
def test_other_books_serve_forks_as_any_request(kv):
    limits = SchedulerLimits(max_running=8, max_step_tokens=64, max_position=96)
    scheduler = SCHEDULERS.build("fcfs").build(KV_MANAGERS.build(kv).build(4096), limits)
    for request in answers(3):
        scheduler.add(request)
    assert scheduler.plan(0.0).num_tokens == 64
