import pytest

from shoal.core.errors import MachineError
from shoal.cost.gpu.device import Accelerator, GpuCalibration, gpu_of
from shoal.cost.gpu.kernels import ALIGNED, FILL, GAP_S, UNHIDDEN, aligned, attention_s, gemm_s
from shoal.cost.gpu.network import HOP, ring_s
from shoal.cost.gpu.spec import SHOAL, EngineSpec, block_weights
from shoal.cost.latent import latent_of
from shoal.cost.price.accelerated import accelerated
from shoal.cost.published.runs import PublishedRun, engine_as_run, job_of, machine_of
from shoal.cost.shapes import find
from shoal.cost.training.step import ONCE_S, Pricer
from shoal.ir import Device, Estimate, Link, Machine, MemoryTier, TrainJob, Work
from shoal.machine.described import load

K = GpuCalibration(gemm=0.8, gemm_low=0.8, stream=0.8, wire=0.8, host=5e-6)
H100 = Accelerator(
    name="H100",
    peak=(("bf16", 1e15),),
    matmul=(("bf16", 8e14), ("fp8", 1.4e15)),
    stream=3e12,
    capacity=8e10,
    generation="hopper",
    inside=4.5e11,
    domain=8,
    outside=5e10,
)
MEGATRON = EngineSpec("m", tensor_overlap=0.0, data_overlap=False)


def run(**changes):
    base = {
        "shape": find("Llama-3.1-8B"),
        "seq_len": 4096,
        "micro_batch": 1,
        "global_batch": 8,
        "engine": MEGATRON,
    }
    return PublishedRun(**{**base, **changes})


def price(one: PublishedRun) -> Estimate:
    pricer = Pricer(machine_of(H100, one.devices), engine_as_run(one), constants=K)
    return pricer.estimate(Work(shape=one.shape, job=job_of(one)))


def test_a_product_that_fills_its_waves_by_hand():
    # 32 x 132 tiles of 256 x 128: whole waves on 132 units.
    M, N, width = 32 * 256, 132 * 128, 4096
    flops = 2.0 * M * N * width
    busy = flops / (8e14 * 0.8 * width / (width + FILL))
    moved = 2.0 * (M * width + N * width + M * N) / (0.8 * 3e12)
    assert gemm_s(M, N, width, H100, K) == pytest.approx(busy + UNHIDDEN * moved + GAP_S)


def test_one_tile_more_than_a_wave_costs_a_wave():
    full = gemm_s(12 * 256, 11 * 128, 8192, H100, K) - GAP_S
    more = gemm_s(12 * 256 + 8, 11 * 128, 8192, H100, K) - GAP_S
    assert more > 1.05 * full
    assert gemm_s(0, 1, 1, H100, K) == 0.0


def test_sides_that_are_no_multiples_are_slow():
    assert aligned(128.0) == 1.0 and aligned(180.0) == ALIGNED[4] and aligned(7.5) == 1.0
    assert gemm_s(4096, 4100, 4096, H100, K) > 2 * gemm_s(4096, 4096, 4096, H100, K)


def test_a_thin_product_takes_the_time_of_its_weights():
    seconds = gemm_s(8, 8192, 8192, H100, K)
    assert seconds > 2.0 * 8192 * 8192 / (0.8 * 3e12)


def test_fp8_products_take_the_rate_of_eight_bits():
    ratio = gemm_s(8192, 8448, 8192, H100, K) / gemm_s(8192, 8448, 8192, H100, K, "fp8")
    assert 1.5 < ratio < 1.9
    with pytest.raises(MachineError, match="matmul_flops has no rate for fp32"):
        Accelerator("x", (), (), 1e12, 1e9, "hopper", 1e9, 1, 1e9).rate("fp32")


def test_attention_does_half_the_square_and_the_backward_pass_ten_products():
    def of(kernel, *, backward=False):
        return attention_s(
            heads=32, queries=8192, keys=8192, head_dim=128, value_dim=128,
            kernel=kernel, gpu=H100, k=K, backward=backward,
        )  # fmt: skip

    flops = 0.5 * 32 * 8192**2 * 2 * 256
    share = 0.38 * 8192 / (8192 + 700)
    assert of("flash2") == pytest.approx(flops / (share * 0.8 * 8e14 / 0.803) + GAP_S)
    assert of("best") < of("flash2") < of("flash1") < of("plain")
    assert of("flash2", backward=True) > 2.4 * of("flash2")


def test_rings_by_hand():
    assert ring_s(9e9, 8, 1, H100, K) == pytest.approx(
        9e9 * 7 / 8 / (0.8 * 4.5e11) + HOP * 7 * 3e-6 + 3e-6
    )
    # 16 ranks on two nodes: eight ports a node are as fast as the links inside.
    wide = ring_s(9e9, 16, 1, H100, K)
    thin = ring_s(9e9, 2, 8, H100, K)
    assert wide == pytest.approx(9e9 * 15 / 16 / (0.8 * 4e11), rel=0.01)
    assert thin == pytest.approx(9e9 / 2 / (0.8 * 5e10), rel=0.01)
    assert ring_s(9e9, 1, 1, H100, K) == 0.0


def test_latent_attention_is_read_from_its_shape():
    latent = latent_of(find("DeepSeek-V3"))
    assert latent is not None
    assert (latent.query, latent.kv, latent.plain, latent.rotary, latent.value) == (
        1536, 512, 128, 64, 128,
    )  # fmt: skip
    assert latent_of(find("Llama-3.1-8B")) is None


def test_weights_of_blocks_add_up_to_the_model():
    shape = find("DeepSeek-V3")
    dense, rest, experts = block_weights(shape)
    total = 3 * dense + 58 * (rest + experts) + 2 * shape.vocab_size * shape.hidden
    assert total == pytest.approx(671e9, rel=0.002)


def test_the_products_of_a_block_are_those_of_its_weights():
    shape = find("DeepSeek-V3")
    ops = accelerated(
        shape, seq_len=4096, microbatch=1, precision="bf16", engine=MEGATRON, experts=(1, 1)
    )
    made = {op.name: op for op in ops if op.kind == "matmul"}
    weights = {name: op.count * op.groups * op.N * op.K for name, op in made.items()}
    dense, rest, experts = block_weights(shape)
    total = 3 * dense + 58 * (rest + experts) + shape.vocab_size * shape.hidden
    assert sum(weights.values()) == pytest.approx(total, rel=1e-6)
    # Every expert has its share of the tokens that go to eight of them.
    assert made["expert_in"].M == 4096 * 8 / 256
    assert made["expert_in"].groups == 256
    # Shoal computes one expert after the other.
    own = accelerated(shape, seq_len=4096, microbatch=1, precision="bf16", engine=SHOAL)
    single = next(op for op in own if op.name == "expert_in")
    assert (single.groups, single.count) == (1, 58 * 256)


def test_a_step_is_its_causes():
    one = price(run())
    assert sum(one.terms_s.values()) == pytest.approx(one.step_s.value)
    passes = one.terms_s["matmul"] + one.terms_s["attention"] + one.terms_s["memory"]
    again = price(run(global_batch=16))
    more = sum(again.terms_s[cause] for cause in ("matmul", "attention", "memory"))
    assert more == pytest.approx(2 * passes)
    assert one.terms_s["overhead"] == ONCE_S  # the host is ahead of such passes
    piped = price(run(pp=4, global_batch=32))
    assert piped.terms_s["bubble"] > 0


def test_the_stage_with_the_output_layer_has_fewer_blocks_where_that_helps():
    # Four stages of 33 blocks: 9, 9, 9 and 6 with the output layer.
    shape = find("Llama-3.1-8B").model_copy(update={"num_layers": 33})
    three = {cause: price(run(shape=shape, pp=4)).terms_s[cause] for cause in ("matmul", "bubble")}
    even = shape.model_copy(update={"num_layers": 36})
    same = {cause: price(run(shape=even, pp=4)).terms_s[cause] for cause in ("matmul", "bubble")}
    # Nine blocks and the output layer are more than nine blocks.
    assert three["matmul"] < 0.9 * same["matmul"]


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"recompute": "full"}, {"recompute": "none"}),
        ({"recompute": "full"}, {"recompute": "half"}),
        ({"recompute": "half"}, {"recompute": "none"}),
        ({"engine": EngineSpec("e", style="eager")}, {"engine": EngineSpec("e")}),
        (
            {"tp": 4, "sp": True},
            {"tp": 4, "sp": True, "engine": EngineSpec("o", tensor_overlap=0.8)},
        ),
        (
            {"dp": 8, "zero": 3},
            {"dp": 8, "zero": 3, "engine": EngineSpec("o", data_overlap=True)},
        ),
        ({"pp": 8, "vpp": 1}, {"pp": 8, "vpp": 4}),
        ({}, {"precision": "fp8"}),
        ({}, {"tuned": "lora"}),
        ({}, {"window": (1024, 1.0)}),
        ({"tp": 4}, {"tp": 4, "sp": True}),
    ],
)
def test_what_is_known_to_cost_costs(slower, faster):
    assert price(run(**slower)).step_s.value > price(run(**faster)).step_s.value


def test_experts_exchange_their_tokens():
    shape = find("Qwen3-30B-A3B")
    alone, shared = (price(run(shape=shape, dp=8, ep=ep)) for ep in (1, 8))
    assert alone.wire_bytes.keys() == shared.wire_bytes.keys() == {"device"} or not alone.wire_bytes
    assert shared.wire_bytes["device"] > 0
    looped = EngineSpec("l", fused_experts=False)
    assert price(run(shape=shape, engine=looped)).terms_s["overhead"] > 0.1


def test_a_machine_becomes_floats():
    machine = Machine(
        name="2xG",
        nodes=2,
        devices_per_node=8,
        device=Device(
            name="NVIDIA A100",
            kind="gpu",
            matmul_flops={"bf16": 2e14},
            memory=(MemoryTier(name="hbm", capacity_bytes=8 * 10**10, read_bandwidth=2e12),),
        ),
        links=(
            Link(scope="device", bandwidth=3e11, latency_s=4e-6),
            Link(scope="node", bandwidth=2.5e10, latency_s=6e-6),
        ),
    )
    gpu = gpu_of(machine)
    assert gpu.generation == "ampere" and gpu.rate("fp16") == 2e14 and gpu.domain == 8
    bare = machine.device.model_copy(
        update={"memory": (MemoryTier(name="hbm", capacity_bytes=8 * 10**10),)}
    )
    with pytest.raises(MachineError, match="read_bandwidth"):
        gpu_of(machine.model_copy(update={"device": bare}))


@pytest.mark.parametrize(
    ("model", "machine", "split"),
    [
        ("Llama-3.1-8B", "8xH100", {"dp": 8}),
        ("Llama-3.1-70B", "64xH100", {"dp": 2, "tp": 8, "pp": 4}),
        ("Qwen3-30B-A3B", "8xH100", {"dp": 8, "ep": 8}),
    ],
)
def test_no_step_is_shorter_than_what_the_search_takes_for_the_least(model, machine, split):
    shape, pricer = find(model), Pricer(load(machine))
    for recompute in ("none", "full"):
        job = TrainJob(
            model=model, seq_len=2048, global_batch=64, microbatch=1, parallel=split,
            recompute=recompute,
        )  # fmt: skip
        work = Work(shape=shape, job=job)
        least = pricer.least_s(work, 1, recompute)
        whole = pricer.estimate(work).step_s.value
        assert 0.3 * whole < least <= whole


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("V100", "volta"),
        ("T4", "turing"),
        ("A10", "ampere"),
        ("A6000", "ampere"),
        ("RTX-3090", "ampere"),
        ("L4", "ada"),
        ("L40S", "ada"),
        ("RTX-4090", "ada"),
        ("H20", "hopper"),
        ("GH200", "hopper"),
        ("GB300", "blackwell"),
        ("DGX-Spark", "blackwell"),
        ("RTX-PRO-6000", "blackwell"),
        ("RTX-5090", "blackwell"),
        ("MI250X", "cdna2"),
        ("MI325X", "cdna3"),
        ("MI355X", "cdna4"),
        ("TPU-v6e", "tpu"),
        ("Gaudi3", "tpu"),
        ("Trainium2", "tpu"),
    ],
)
def test_the_architecture_of_a_device(name: str, generation: str) -> None:
    machine = load(name)
    gpu = gpu_of(machine)
    assert gpu.generation == generation
    # No kernel of attention is faster than the products that it is made of.
    forward, backward = gpu.facts.attention.get("best", gpu.facts.attention["flash2"])
    assert backward < forward < gpu.facts.reach
