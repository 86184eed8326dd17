"""Guesses change how many steps it takes, and no token: any tree, any batch, any preemption."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from speculative import Knowing  # noqa: E402

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402
from shoal.serve.decode.protocols import branches  # noqa: E402

VOCAB = 160


def prompts(count=9, seed=3):
    source = random.Random(seed)
    made = [[source.randrange(VOCAB) for _ in range(source.choice([1, 5, 16, 17, 40, 90]))]
            for _ in range(count)]  # fmt: skip
    made[-1][: len(made[0])] = made[0]
    return made


PARAMS = [
    {},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "seed": 7, "logprobs": 3},
    {"logprobs": 2},
    {"frequency_penalty": 0.4},
    {"max_tokens": 1},
    {"temperature": 0.7, "min_p": 0.05, "stop_ids": frozenset(range(40))},
    {"stop_ids": frozenset(range(8))},
    {"min_tokens": 6, "stop_ids": frozenset(range(60))},
]


def params():
    return [SamplingParams(**{"max_tokens": 40, **one}) for one in PARAMS]


def answers(serve_all, engine, asked):
    result = serve_all(engine, asked, params=params())
    return {
        f"r{number}": [*prompt, *new]
        for number, (prompt, new) in enumerate(zip(asked, result, strict=True))
    }


def guessing(engine, known, nodes, seed):
    drafter = Knowing(known, VOCAB, seed=seed)
    engine.runner.drafter = drafter
    engine.scheduler.drafting = FixedDrafting(nodes)
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"max_step_tokens": 24, "kv": {"name": "paged", "block_size": 4}},
        {"kv_tokens": 320, "preempt": "swap", "max_position": 200},
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                {},
                {
                    "kv_tokens": 300,
                    "kv": {"name": "paged", "block_size": 1},
                    "max_position": 200,
                },
                {
                    "scheduler": {"name": "fair", "policy": "markov", "frequency": 0.3},
                    "kv_tokens": 320,
                    "max_position": 200,
                },
                {"scheduler": "prefill_first", "max_running": 3},
                {"kv": {"name": "blockgroups", "init": 4}, "kv_tokens": 320, "max_position": 200},
            )
        ),
    ],
)
def test_same_tokens_as_plain_decoding(fields, random_model, engine_for, serve_all):
    model = random_model(dtype=torch.float64)
    request = prompts()
    known = answers(serve_all, engine_for(model), request)
    assert len({token for row in known.values() for token in row}) > 60
    preempted = 0
    for nodes, seed in ((1, 0), (7, 1), (20, 2)):
        engine = engine_for(model, speculative="ngram", **fields)
        drafter = guessing(engine, known, nodes, seed)
        assert answers(serve_all, engine, request) == known
        stats = engine.stats()
        assert stats["blocks_used"] == 0
        assert 0 < stats["draft_tokens_accepted_total"] < stats["draft_tokens_total"]
        preempted += stats["preemptions_total"]
        for name, result in drafter.seen.items():
            assert result == {place: known[name][place] for place in result}
            assert len(result) >= 0.5 * len(known[name])  # the rest was cached, or came last
    assert bool(preempted) == (fields.get("kv_tokens", 4096) < 640)


def test_a_right_chain_takes_a_step_for_all_of_it(random_model, engine_for, serve_all):
    model = random_model(dtype=torch.float64)
    request = prompts(1)
    known = {"r0": [*request[0], *serve_all(engine_for(model), request, max_tokens=41)[0]]}
    engine = engine_for(model, speculative="ngram")
    engine.scheduler.drafting = FixedDrafting(4)
    engine.runner.drafter = Knowing(known, VOCAB)

    def chain(request, most):
        ahead = known["r0"][len(request.tokens) :][:most]
        import numpy as np

        from shoal.serve.decode.protocols import TokenTree

        tokens = [request.tokens[-1], *ahead]
        return TokenTree(np.array(tokens), branches(tuple(range(-1, len(ahead)))))

    engine.runner.drafter._tree = chain
    assert serve_all(engine, request, max_tokens=41)[0] == known["r0"][len(request[0]) :]
    stats = engine.stats()
    assert stats["steps_total"] == 1 + 8  # the prompt's token, then five a step
    assert stats["draft_tokens_accepted_total"] == stats["draft_tokens_total"] == 32


def test_log_probabilities_are_those_of_plain_decoding(random_model, engine_for):
    model = random_model(dtype=torch.float64)
    result = prompts(1)[0]
    infos = []
    known = None
    for speculative in (None, "ngram"):
        engine = engine_for(model, speculative=speculative)
        if known is not None:
            guessing(engine, known, 6, 1)
        request = Request(
            "r0", list(result), len(result), SamplingParams(max_tokens=20, logprobs=2)
        )
        engine.add(request)
        results = []
        while engine.busy:
            for output in engine.step():
                assert len(output.infos) == len(output.tokens)
                results += output.infos
        known = {"r0": request.tokens}
        infos.append(results)
    for plain, guessed in zip(*infos, strict=True):
        assert guessed.logprob == pytest.approx(plain.logprob, abs=1e-6)
        assert [token for token, _ in guessed.top] == [token for token, _ in plain.top]


def test_tree_rows_have_the_logits_of_their_own_path(random_model, engine_for):
    """Of every node, as a plain pass over its root path has them."""
    model = random_model(dtype=torch.float64)
    engine = engine_for(model, speculative="ngram")
    tokens = prompts(1)[0]
    engine.scheduler.drafting = FixedDrafting(12)
    drafter = Knowing({"r0": [*tokens, *range(30)]}, VOCAB, right=0.5, seed=5)
    engine.runner.drafter = drafter
    caught = []

    def walk(trees, requests, logits):
        caught.append((trees[0], list(requests[0].tokens), logits.clone()))
        return accept.walk(trees, requests, logits)

    accept = engine.runner.accept
    engine.runner.accept = type("Spy", (), {"walk": staticmethod(walk), "check": accept.check})
    engine.add(Request("r0", list(tokens), len(tokens), SamplingParams(max_tokens=12)))
    while engine.busy:
        engine.step()
    assert sum(tree.nodes for tree, _, _ in caught) > 20
    for tree, before, logits in caught:
        for row in range(len(tree.shape)):
            path, at = [], row
            while at > 0:
                path.append(int(tree.tokens[at]))
                at = tree.shape.parent[at]
            whole = torch.tensor([before + path[::-1]])
            torch.testing.assert_close(logits[row], model(whole)[0, -1], rtol=0, atol=1e-9)


def test_recorded_steps_give_the_same_bits_as_others(random_model, serve_all, recordable):
    from shoal.serve.engine.build import engine_of

    model = random_model(dtype=torch.float32)
    from shoal.model.accelerate import accelerate

    accelerate(model)
    job = ServeJob(model="tiny", kv_tokens=4096, threads=1, speculative={"name": "ngram"})
    request = prompts()
    engine = engine_of(job, model)[0]
    assert engine.runner._recorded is not None
    known = {f"r{n}": [*p, *range(40)] for n, p in enumerate(request)}
    results = []
    for recorded in (engine.runner._recorded, None):
        engine.runner._recorded = recorded
        guessing(engine, known, 5, 2)
        results.append(serve_all(engine, request, params=params()))
        if recorded is not None:
            assert any(one is not None and one.tape for one in recorded.known.values())
            assert not recorded.reasons
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheduler": "static"}, "scheduler = static with speculative = ngram"),
        ({"kv": "distributed"}, "kv = distributed with speculative"),
        ({"parallel": {"tp": 2}}, "parallel = several ranks with speculative"),
        ({"adapters": {"a": "b"}}, "adapters with speculative = ngram"),
        ({"speculative": "medussa"}, "medussa"),
        ({"speculative": {"name": "ngram", "longest": 0}}, "shortest"),
        ({"speculative": {"name": "ngram", "accept": "grady"}}, "grady"),
    ],
)
def test_what_does_not_go_together_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        ServeJob.model_validate({"model": "tiny", "speculative": "ngram", **fields})


def test_greedy_acceptance_refuses_a_temperature(random_model, engine_for):
    engine = engine_for(random_model(), speculative={"name": "ngram", "accept": "greedy"})
    request = Request("r0", [1, 2], 2, SamplingParams(max_tokens=4, temperature=0.5))
    with pytest.raises(ServeError, match=r"temperature = 0.5: expected 0.*sample_match"):
        engine.add(request)
    assert not engine.busy
    engine.add(Request("r1", [1, 2], 2, dataclasses.replace(request.params, temperature=0.0)))
    while engine.busy:
        engine.step()


def test_a_drafter_that_guesses_too_much_is_named(random_model, engine_for):
    engine = engine_for(random_model(dtype=torch.float64), speculative="ngram")
    drafter = guessing(engine, {"r0": [1, 2, *range(60)]}, 2, 0)
    tree = drafter._tree
    drafter._tree = lambda request, most: tree(request, 9)
    engine.add(Request("r0", [1, 2], 2, SamplingParams(max_tokens=40)))
    with pytest.raises(ServeError, match=r"guessed tokens = .: expected at most 2"):
        while engine.busy:
            engine.step()


def test_the_text_itself_guesses_what_it_repeats(random_model, engine_for, serve_all):
    model = random_model(dtype=torch.float64)
    requests = [[*range(30), *range(30)] * 2]
    plain = serve_all(engine_for(model), requests, max_tokens=24)
    engine = engine_for(model, speculative={"name": "ngram", "shortest": 1})
    engine.scheduler.drafting = FixedDrafting(6)
    assert serve_all(engine, requests, max_tokens=24) == plain
    assert engine.stats()["draft_tokens_total"] > 0
