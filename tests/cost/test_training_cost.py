import math

import pytest

from shoal.core.errors import MachineError, PlanError
from shoal.cost.gpu.spec import groups_of
from shoal.cost.price.collectives import all_reduce_s, gather_s
from shoal.cost.price.expert_hops import once_a_node
from shoal.cost.price.rates import Curve, RankRates
from shoal.cost.shapes import find
from shoal.cost.training.step import ONCE_S, Pricer, estimate
from shoal.cost.training.totals import steps_of
from shoal.ir import Device, Link, Machine, Measurement, MemoryTier, Parallel, TrainJob, Work


def cpu(cores=2, nodes=1, **changes):
    def measured(threads, at, rate):
        return Measurement(
            probe="framework",
            quantity="elementwise_bandwidth",
            unit="B/s",
            median=rate,
            low=rate,
            high=rate,
            repeats=5,
            at=at,
            note=f"threads={threads}",
        )

    links = [Link(scope="loopback", bandwidth=2e9, latency_s=5e-5)]
    if nodes > 1:
        links.append(Link(scope="node", bandwidth=1e9, latency_s=1e-4))
    return Machine(
        name="cpu",
        provenance="probed",
        nodes=nodes,
        device=Device(
            name="cpu",
            kind="cpu",
            num_cores=cores,
            matmul_flops={"fp32": 1.5e11 * cores, "bf16": 1e12 * cores},
            matmul_flops_1core={"fp32": 1.5e11, "bf16": 1e12},
            op_overhead_s=4e-6,
            memory=(
                MemoryTier(name="l2", capacity_bytes=2**21, read_bandwidth=1e11),
                MemoryTier(
                    name="dram",
                    capacity_bytes=24 * 10**9,
                    read_bandwidth=3e10,
                    write_bandwidth=2e10,
                ),
            ),
        ),
        links=tuple(links),
        measurements=tuple(
            measured(threads, at, rate * threads)
            for threads in sorted({1, cores})
            for at, rate in ((2**20, 3e10), (2**25, 2e10), (2**28, 1e10))
        ),
        **changes,
    )


def gpus(nodes=1, per=8):
    return Machine(
        name=f"{nodes * per}xG",
        nodes=nodes,
        devices_per_node=per,
        device=Device(
            name="G",
            kind="gpu",
            matmul_flops={"bf16": 6e14, "fp32": 5e13},
            memory=(MemoryTier(name="hbm", capacity_bytes=80 * 10**9, read_bandwidth=3e12),),
            power_watts=700,
        ),
        links=(
            Link(scope="device", bandwidth=3e11, latency_s=4e-6),
            Link(scope="node", bandwidth=5e10, latency_s=6e-6),
        ),
        usd_per_device_hour=2.0,
        overhead_watts=1000,
    )


def work(model="shoal-4m", **job):
    return Work(shape=find(model), job=TrainJob(model=model, **job))


def test_terms_add_up_and_everything_is_positive():
    cost = estimate(work(parallel={"dp": 2}, steps=10), cpu())
    assert sum(cost.terms_s.values()) == pytest.approx(cost.step_s.value)
    assert cost.step_s.low < cost.step_s.value < cost.step_s.high
    assert min(cost.terms_s.values()) >= 0
    assert set(cost.memory_bytes) == {
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "runtime",
    }
    assert cost.tokens == 16 * 256
    assert cost.bound in {"compute", "memory", "network", "bubble", "overhead"}


def test_two_ranks_halve_the_compute_and_pay_for_the_wire():
    one = estimate(work(threads=1), cpu())
    two = estimate(work(threads=1, parallel={"dp": 2}), cpu())
    assert two.terms_s["matmul"] == pytest.approx(one.terms_s["matmul"] / 2, rel=0.1)
    assert one.terms_s["collective"] == 0 < two.terms_s["collective"]
    assert two.wire_bytes["loopback"] > 0


def test_ranks_beyond_the_cores_bring_nothing():
    two = estimate(work(parallel={"dp": 2}), cpu())
    four = estimate(work(parallel={"dp": 4}), cpu())
    assert four.step_s.value > 0.95 * two.step_s.value


def test_model_flops_rate_on_gpus_is_below_the_matmul_rate():
    cost = estimate(
        work("Llama-3-8B", seq_len=4096, global_batch=64, parallel={"dp": 8}, shard="zero3"),
        gpus(),
    )
    reached = cost.flops / cost.step_s.value / 8
    assert 0.3 * 6e14 < reached < 6e14


@pytest.mark.parametrize(
    ("shard", "smaller"),
    [
        ("zero1", {"optimizer"}),
        ("zero2", {"optimizer", "gradients"}),
        ("zero3", {"optimizer", "gradients", "weights"}),
    ],
)
def test_zero_divides_memory(shard, smaller):
    plain = estimate(work("Llama-3-8B", parallel={"dp": 8}), gpus())
    zero = estimate(work("Llama-3-8B", parallel={"dp": 8}, shard=shard), gpus())
    for cause in ("weights", "gradients", "optimizer"):
        ratio = zero.memory_bytes[cause] / plain.memory_bytes[cause]
        assert (ratio < 0.4) == (cause in smaller), cause


def test_recompute_trades_time_for_memory():
    job = {"model": "Llama-3-8B", "seq_len": 2048, "microbatch": 4, "global_batch": 4}
    none, full = (estimate(work(recompute=r, **job), gpus()) for r in ("none", "full"))
    assert full.memory_bytes["activations"] < 0.3 * none.memory_bytes["activations"]
    assert 1.15 < full.step_s.value / none.step_s.value < 1.4


def test_the_bubble_is_what_the_formula_says():
    one = work("Llama-3-8B", parallel={"pp": 4}, microbatch=1, global_batch=16, seq_len=2048)
    # Without an output layer all stages take as long; with one, the last has fewer blocks and the
    # others wait for it, or it for them.
    bare = one.model_copy(update={"shape": one.shape.model_copy(update={"vocab_size": 64})})
    for this, low in ((bare, 0.99), (one, 0.8)):
        cost = estimate(this, gpus())
        rest = cost.terms_s["bubble"] + cost.terms_s["optimizer"] + ONCE_S
        busy = cost.step_s.value - rest
        assert low <= cost.terms_s["bubble"] / (busy * 3 / 16) <= 1.0 + 1e-9


@pytest.mark.parametrize("compiled", [False, True])
def test_passes_of_stages_add_up_to_those_of_the_model(compiled):
    parts = {"microbatch": 1, "global_batch": 8, "seq_len": 2048, "compile": compiled}
    pricer = Pricer(gpus(8))
    whole = pricer.estimate(work("Llama-3-8B", **parts)).terms_s
    compute = sum(whole[cause] for cause in ("matmul", "attention", "memory")) / 8
    costs = pricer.passes(work("Llama-3-8B", parallel={"pp": 4}, **parts)).seconds
    assert sum(costs["F"]) + sum(costs["B"]) == pytest.approx(compute, rel=0.02)


def test_tensor_parallel_ranks_exchange_activations():
    cost = estimate(work("Llama-3-8B", parallel={"tp": 4}, seq_len=2048), gpus())
    layers, size = 32, 16 * 2048 * 4096 * 2
    assert cost.wire_bytes["device"] == pytest.approx((4 * layers + 2) * 2 * size * 3 / 4, rel=0.01)


def test_tiles_hide_sums_behind_products_but_not_the_last_one():
    requests = {"model": "Llama-3-8B", "seq_len": 4096, "microbatch": 1}
    plain, tiled = (
        estimate(work(**requests, parallel={"tp": 8, "overlap": how}), gpus()).terms_s
        for how in ("none", "tile")
    )
    least = plain["collective"] / 32
    assert least * 0.99 < tiled["collective"] < plain["collective"]
    assert plain["collective"] - tiled["collective"] <= plain["matmul"]
    assert tiled["matmul"] == plain["matmul"]
    # Ranks that sum through the memory of their host compute the sums themselves.
    here = [
        estimate(work(parallel={"tp": 2, "overlap": how}), cpu()).terms_s["collective"]
        for how in ("none", "tile")
    ]
    assert here[0] == here[1]


def test_length_energy_and_price():
    cost = estimate(work("Llama-3-8B", tokens=10**9, parallel={"dp": 8}, shard="zero3"), gpus())
    assert steps_of(TrainJob(tokens=4097)) == 2
    assert cost.total_s is not None and cost.energy_j is not None and cost.usd is not None
    assert cost.energy_j.value == pytest.approx(cost.total_s.value * (8 * 700 + 1000))
    assert cost.usd.value == pytest.approx(cost.total_s.value / 3600 * 8 * 2.0)
    assert estimate(work(), cpu()).total_s is None


def test_noise_widens_the_interval():
    quiet = estimate(work(), cpu(noise=0.0)).step_s
    noisy = estimate(work(), cpu(noise=0.2)).step_s
    assert noisy.high > 1.1 * quiet.high


def test_every_shipped_shape_has_an_estimate():
    from shoal.cost.shapes import names

    pricer = Pricer(gpus(8))
    for name in names():
        cost = pricer.estimate(work(name, seq_len=256))
        assert math.isfinite(cost.step_s.value) and cost.memory_total > 0


def test_ring_formulas():
    link = Link(scope="node", bandwidth=1e9, latency_s=1e-5)
    assert gather_s(4e9, 4, link) == pytest.approx(3.0 + 3e-5)
    assert all_reduce_s(4e9, 4, link) == pytest.approx(6.0 + 6e-5)
    assert all_reduce_s(4e9, 1, link) == 0


def test_curves_interpolate_on_log_size():
    curve = Curve(((1.0, 1.0), (100.0, 100.0)))
    assert curve(0.1) == 1 and curve(1e4) == 100
    assert curve(10) == pytest.approx(10)


def test_data_parallel_ranks_on_two_nodes_use_the_slow_link():
    cost = estimate(
        work("Llama-3-8B", parallel={"dp": 2, "tp": 8}, global_batch=16, shard="zero1"), gpus(2)
    )
    assert cost.wire_bytes["node"] > 0


def test_threads_share_the_cores():
    parallel = Parallel(dp=2)
    assert RankRates(cpu(8), parallel).used == 4
    assert RankRates(cpu(8), parallel, threads=1).used == 1
    assert RankRates(cpu(2), Parallel(dp=4)).crowding == 2


def test_bad_input():
    with pytest.raises(PlanError, match="at most 8 ranks"):
        estimate(work(parallel={"dp": 16}), gpus())
    with pytest.raises(PlanError, match=r"parallel\.tp = 3"):
        estimate(work(parallel={"tp": 3}), gpus())
    with pytest.raises(PlanError, match="at most 4, the number of blocks"):
        estimate(work(parallel={"pp": 8}), gpus())
    bare = gpus().model_copy(
        update={"device": gpus().device.model_copy(update={"matmul_flops": {}})}
    )
    with pytest.raises(MachineError, match="matmul_flops"):
        estimate(work(), bare)


def test_tokens_that_cross_once_to_a_node() -> None:
    """Sixteen ranks on two nodes; a token has eight experts, half of them there on average."""
    two = once_a_node([range(16)], 1.0, 1000.0, 8, (1, 1), 8)
    assert two.far == pytest.approx(1000 * 2 * (1 - 0.5**8) / 2)
    assert two.near == pytest.approx(1000 * 8 * 7 / 8)
    # Of two groups of experts, one a node, a token may reach one.
    assert once_a_node([range(16)], 1.0, 1000.0, 8, (1, 2), 8).far == pytest.approx(500)
    # Of eight groups on two nodes a token may reach four, and both nodes.
    assert once_a_node([range(16)], 1.0, 1000.0, 8, (4, 8), 8) == two
    assert once_a_node([range(16)], 1.0, 1000.0, 8, (1, 1), None).far == 0.0


def test_groups_of_experts_that_a_token_may_reach() -> None:
    assert groups_of(find("DeepSeek-V3")) == (4, 8)
    assert groups_of(find("DeepSeek-V2")) == (3, 8)
    assert groups_of(find("Qwen3-235B-A22B")) == (1, 1)
