"""Plans of serving mixtures: groups with attention of their own, weights as published."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.errors import PlanError, ServeError
from shoal.cost.arithmetic import expert_parameters, parameters
from shoal.cost.shapes import find
from shoal.ir import ServeJob, ServeParallel
from shoal.machine.described import load
from shoal.plan.serving.choices import check_split, splits
from shoal.plan.serving.memory import free_tokens, memory_of, token_bytes
from shoal.plan.serving.plans import plan_serve
from shoal.plan.serving.simulation import step_cost_of

DEEPSEEK, NODES = find("DeepSeek-V3"), load("16xH200")


def job(engine: str = "sglang", **parallel: int) -> ServeJob:
    return ServeJob.model_validate(
        {
            "model": "DeepSeek-V3",
            "engine": engine,
            "precision": "bf16",
            "weights": "fp8",
            "max_running": 256,
            "max_step_tokens": 8192,
            "parallel": parallel,
            "workload": {"name": "chat", "requests": 20},
        }
    )


def test_groups_share_the_experts_alone() -> None:
    whole, groups = job(tp=8, pp=2), job(tp=2, dp=8, ep=16)
    before = memory_of(whole, DEEPSEEK, NODES, "bf16", 8192)[0]["weights"]
    after = memory_of(groups, DEEPSEEK, NODES, "bf16", 8192)[0]["weights"]
    experts, rest = expert_parameters(DEEPSEEK), parameters(DEEPSEEK) - expert_parameters(DEEPSEEK)
    # 8 bits and the scales of columns; embedding and output in 16.
    assert before == pytest.approx((experts + rest) / 16, rel=0.01)
    assert after == pytest.approx(experts / 16 + rest / 2, rel=0.1)
    # The compressed keys that tensor ranks hold each for themselves, groups hold once.
    assert token_bytes(groups, DEEPSEEK, "bf16") == 2 * token_bytes(whole, DEEPSEEK, "bf16")
    many = free_tokens(groups, DEEPSEEK, NODES, "bf16")
    alone = free_tokens(job(tp=16), DEEPSEEK, NODES, "bf16")
    assert many > 6 * alone


def test_a_step_of_groups_is_that_of_one_with_its_share() -> None:
    cost = step_cost_of(job(tp=2, dp=8, ep=16), NODES)
    few, many = ([(1000, 1)] * n for n in (8, 256))
    assert cost.seconds(few) < cost.seconds(many) < 32 * cost.seconds(few)
    # Tensor parallelism sums over 16 devices of two nodes; groups exchange tokens of experts.
    whole = step_cost_of(job(tp=16), NODES)
    assert cost.terms(many).attention < whole.terms(many).attention


def test_time_per_token_by_concurrency() -> None:
    """DeepSeek-V3 on 16 H200: 11 to 41 ms by concurrency, as measured runs have it."""
    cost = step_cost_of(job(tp=8, pp=2), NODES)
    # Of 256 requests, half are in each of two steps under way.
    low, high = (1e3 * cost.seconds([(2000, 1)] * n) for n in (1, 128))
    assert low == pytest.approx(11, rel=0.15) and high == pytest.approx(41, rel=0.15)


def test_groups_compete_and_need_a_mixture_and_an_engine() -> None:
    ways = [one.parallel for one in splits(job(tp=8, pp=2), NODES)]
    assert ServeParallel(tp=2, dp=8, ep=16) in ways and ServeParallel(dp=16, ep=16) in ways
    assert all(one.parallel.dp == 1 for one in splits(job("shoal", tp=8, pp=2), NODES))
    assert plan_serve(job(tp=2, dp=8, ep=16), NODES).fits
    with pytest.raises(PlanError, match=r"parallel\.dp = 8: expected 1, or experts"):
        check_split(job("shoal", tp=2, dp=8), DEEPSEEK, NODES)
    dense = job(tp=2, dp=8).model_copy(update={"model": "Qwen3-8B"})
    with pytest.raises(PlanError, match=r"parallel\.dp = 8"):
        check_split(dense, find("Qwen3-8B"), NODES)
    for ep in (job(tp=2, dp=8, ep=3), job("shoal", tp=8, ep=8)):
        with pytest.raises(PlanError, match=r"parallel\.ep = .: expected 1, or a divisor of the"):
            check_split(ep, DEEPSEEK, NODES)


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"tp": 2, "ep": 2}])
def test_shoal_serves_no_groups(parallel: dict[str, int]) -> None:
    from shoal.serve.engine.process import factory_of

    with pytest.raises(ServeError, match=r"parallel = 'dp=\d, ep=\d': expected 1 of each"):
        factory_of(ServeJob.model_validate({"model": "shoal-4m", "parallel": parallel}))


def test_weights_are_taken_as_published() -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(app, ["plan", "serve", *words, "--requests", "4"])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    # 117 billion parameters, 63 GB in the format of their files: one GPU of 80 GB.
    oss = said("gpt-oss-120b", "-m", "1xH100", "--engine", "vllm")
    assert "weights mxfp4" in oss and "no plan fits" not in oss
    assert "weights fp8" in said("Qwen/Qwen3-8B-FP8", "-m", "1xH100", "--no-compare")
    stated = said("gpt-oss-20b", "-m", "1xH100", "--set", "weights=plain", "--no-compare")
    assert "weights plain (--set weights)" in stated
