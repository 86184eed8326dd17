"""Hooks act in one order, whoever registers them when; hubs know no technique."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.serve.engine import ahead, client, loop, runner  # noqa: E402
from shoal.serve.engine.client import EngineClient  # noqa: E402
from shoal.serve.engine.counters import CountersHook  # noqa: E402
from shoal.serve.engine.crashes import CrashHistory  # noqa: E402
from shoal.serve.engine.hooks import ORDER, EngineHook, EngineHooks  # noqa: E402
from shoal.serve.engine.isolation import IsolationHook  # noqa: E402
from shoal.serve.engine.loop import Engine  # noqa: E402
from shoal.serve.engine.pooling import PoolingHook  # noqa: E402

TECHNIQUES = {"max_adapters": 1, "preempt": "swap", "host_tokens": 512, "kv_tokens": 512}


def request(name="r", **sampling):
    return Request(name, [5, 6, 7], 3, SamplingParams(**{"max_tokens": 2, **sampling}))


def told_by(hook_type, log, name):
    """A hook of another package that writes down every moment, and changes nothing."""

    def moment(which):
        inner = getattr(EngineHook, which)

        def act(self, *args):
            log.append((name, which))
            return inner(self, *args)

        return act

    moments = [one for one, _ in inspect.getmembers(EngineHook, inspect.isfunction)]
    return type(name, (hook_type,), {one: moment(one) for one in moments})()


def test_hooks_stand_in_the_order_whenever_they_are_registered(random_model, engine_for):
    engine = engine_for(random_model("qwen3"), precision="fp32", **TECHNIQUES)
    places = [hook.kind for hook in engine.hooks]
    want = ["counters", "isolation", "host_copies", "adapters", "pooling", "prompt_logprobs"]
    want.append("grammar")
    assert [one for one in places if one != "recording"] == want
    inside = [hook.kind for hook in engine.runner.hooks]
    assert [one for one in inside if one != "recording"] == [*want[2:6], "penalties", "grammar"]
    for given in (list(engine.hooks), list(engine.hooks)[::-1]):
        assert [hook.kind for hook in EngineHooks(given)] == places
    assert sorted(places, key=ORDER.index) == places
    assert len(set(ORDER)) == len(ORDER)


def test_a_hook_that_is_unknown_or_there_already_is_refused(random_model, engine_for):
    class Strange(EngineHook):
        after = "between"

    class Other(EngineHook):
        kind = "pooling"

    engine = engine_for(random_model())
    with pytest.raises(ConfigError, match="and after = 'between': expected one of crashes, count"):
        engine.register(Strange())
    for again in (PoolingHook(), Other()):
        with pytest.raises(
            ConfigError, match="kind = 'pooling': expected a kind of which there is"
        ):
            engine.register(again)
    engine.register(EngineHook())
    with pytest.raises(ConfigError, match="kind = 'EngineHook'"):
        engine.register(EngineHook())
    with pytest.raises(ConfigError, match="'counters'"):
        Engine(engine.scheduler, engine.runner, hooks=[CountersHook()])
    with pytest.raises(ConfigError, match="'crashes'"):
        EngineHooks([CrashHistory(), CrashHistory()])


def test_a_hook_of_another_package_sees_every_moment_in_order(random_model, engine_for):
    log = []
    first, second = told_by(EngineHook, log, "First"), told_by(EngineHook, log, "Second")
    engine = engine_for(random_model())
    for hook in (first, second):
        engine.register(hook)
        engine.runner.hooks.add(hook)
    engine.add(request())
    while engine.busy:
        engine.step()
    engine.abort("nobody")
    engine.stats()
    engine.close()
    often = ("guard", "facts", "answers", "replay")  # as there are hooks, looks or kernels
    mine, others = (
        [which for name, which in log if name == one and which not in often]
        for one in ("First", "Second")
    )
    assert others == mine
    planning, commit = ["before_plan", "planned"], ["executed", "committed"]
    work = ["before_pass", "lay_out", "around", "wanted", "computed", "transferred"]
    step = [*planning, *work, *commit]
    assert mine == ["check", "admitted", *step, *step, "ended", "ended", "metrics", "close"]
    assert [which for name, which in log if name == "First"].count("replay") == 2
    both = [one for one in log if one[1] == "planned"]
    assert both == [("First", "planned"), ("Second", "planned")] * 2
    assert sum(which == "guard" for name, which in log if name == "First") >= 6


def test_a_hook_may_refuse_change_and_recover(random_model, engine_for):
    class Careful(EngineHook):
        def check(self, request):
            if request.params.seed == 13:
                raise ServeError("an unlucky seed")
            request.salt = f"careful {request.salt}"

        def planned(self, step):
            if broken:
                raise ServeError(broken.pop())
            return step

        def failed(self, cause):
            recovered.append(cause)
            return True

        def facts(self):
            return {"careful": True}

        def answers(self):
            return {"recovered": lambda: len(recovered)}

    broken, recovered = [], []
    engine = engine_for(random_model())
    engine.register(Careful())
    assert engine.facts["careful"]
    with pytest.raises(ServeError, match="unlucky"):
        engine.add(request(seed=13))
    assert not engine.busy
    response = request()
    engine.add(response)
    assert response.salt == "careful "
    broken.append("once")
    assert engine.step() == []
    assert engine.answers["recovered"]() == 1
    while engine.busy:
        engine.step()
    assert response.n_generated == 2


def test_scores_are_adjusted_by_hooks_of_others_last(random_model, engine_for):
    class Only(EngineHook):
        def wanted(self, requests):
            return [row for row, one in enumerate(requests) if one.id == "mine"]

        def adjust(self, scores, rows, requests):
            assert [requests[row].id for row in rows] == ["mine"]
            scores[rows] = -1.0
            scores[rows, 9] = 0.0
            return {}

    engine = engine_for(random_model())
    engine.runner.hooks.add(Only())
    both = [request("mine", logit_bias=((8, 1e5),)), request("other", logit_bias=((8, 1e5),))]
    for one in both:
        engine.add(one)
    while engine.busy:
        engine.step()
    assert [one.tokens[3:] for one in both] == [[9, 9], [8, 8]]


def test_what_a_failed_step_leaves_is_cleared_with_the_next_chunks():
    from shoal.ir import Chunk, Step

    isolation = IsolationHook()
    isolation._scrub = [3]
    waits = Step((), wait_for=(1,))
    assert isolation.planned(waits) is waits  # nothing is cleared where nothing is computed
    computes = Step((Chunk(request(), 0, 3),))
    assert isolation.planned(computes).scrub == (3,)
    assert isolation.planned(computes) is computes


HUBS = (loop, ahead, runner, client)
FIXED = {
    "adjust", "captured", "counters", "crashes", "failure", "frames", "hooks", "isolation",
    "launch", "link", "loop", "output_queue", "params", "process", "token_choice", "wire",
}  # fmt: skip


@pytest.mark.parametrize("hub", HUBS, ids=lambda hub: hub.__name__.rpartition(".")[2])
def test_hubs_import_no_technique(hub):
    tree = ast.parse(Path(hub.__file__).read_text())
    names = [one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    for name in names:
        room, _, last = name.removeprefix("shoal.serve.").partition(".")
        if room == "engine":
            assert last in FIXED - {"captured"}, name
        assert room not in {"adapters", "cluster", "text", "ranks"}, name


@pytest.mark.parametrize("life", [Engine.step, ahead.AheadEngine.step, EngineClient.batches])
def test_a_life_is_read_on_one_screen(life):
    assert len(inspect.getsource(life).splitlines()) <= 40
