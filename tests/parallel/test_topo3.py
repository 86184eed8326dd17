"""Three-level ZeRO: equal to one process, its bytes and its memory those of the formulas."""

import math
from typing import Any

import pytest
import torch
from parallel_splits import config as eight
from parallel_splits import job
from torch import Tensor

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one, tokens
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.core.parts import Choice, table
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Link, Parallel, Work
from shoal.machine.described import load
from shoal.model.config import ModelConfig
from shoal.parallel.comm.compress import pack, unpack
from shoal.parallel.comm.wire import packed_bytes
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.shard.levelled import LevelledModel
from shoal.parallel.shard.topo3_cost import hops, span
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.strategy.space import sharding_choices

LAYERS = 2
QUANT = {"weights": "int8", "grads": "int4"}


def config() -> ModelConfig:
    return eight(num_layers=LAYERS)


def topo3(*levels: int, **options: Any) -> dict[str, Any]:
    return {"name": "topo3", "levels": list(levels), **options}


@pytest.mark.parametrize(
    ("parallel", "shard", "recompute"),
    [
        pytest.param({"dp": 8}, topo3(2, 4), "full", marks=pytest.mark.slow),
        ({"dp": 4}, topo3(1, 2), "none"),
        ({"dp": 4}, topo3(4, 4), "none"),
        ({"dp": 4}, topo3(4, 4, secondary=2), "full"),
        ({"dp": 4}, topo3(4, 2, secondary=2), "full"),
        ({"dp": 4}, "topo3", "none"),
        pytest.param({"dp": 4, "tp": 2, "sp": True}, topo3(2, 2), "none", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "pp": 2}, topo3(2, 4), "none", marks=pytest.mark.slow),
    ],
)
def test_same_as_one(parallel: dict[str, int], shard: Any, recompute: str) -> None:
    one = job(parallel, shard=shard, microbatch=1, recompute=recompute)
    result = same_as_one(one, config())
    assert result.same, result


def train(one: Any, *, steps: int = 1, hook: Any = None, **nodes: Any) -> list[Any]:
    """Steps of a job on threads; of each rank its bytes by op, scope and tag, and the hook's."""
    weights = SeededWeights(config(), dtype=torch.float32)
    schedule = check_split(one, config().shape())

    def run(comm: ThreadComm) -> Any:
        engine = ParallelEngine(one, schedule, weights, comm, dtype=torch.float32)
        owned = engine.sharded.owned()
        adam = torch.optim.AdamW(list(owned.values()))
        for step in range(steps):
            rows = tokens(one, config().vocab_size, step, documents=False)
            share = len(rows.inputs) // engine.replicas
            mine = slice(engine.replica * share, (engine.replica + 1) * share)
            rows = ReplicaSequences(rows.inputs[mine], rows.targets[mine], None, mine.start, step)
            engine.backward(rows, one.microbatch, 100.0)
            before = hook(engine) if hook is not None else None
            engine.finish()
            adam.step()
            engine.sharded.publish()
        sizes = [
            (unit.flat.numel(), all(len(shape) < 2 for shape in unit.shapes))
            for unit in engine.sharded._units  # type: ignore[attr-defined]
        ]
        return comm.meter.totals(), sizes, before

    return run_ranks(one.parallel.world, run, **nodes)


def bytes_by_scope(totals: dict[str, float], tags: tuple[str, ...]) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, value in totals.items():
        parts = dict(x.split("=") for x in key.split("{")[1][:-1].split(","))
        if parts["tag"] in tags:
            values[parts["scope"]] = values.get(parts["scope"], 0.0) + value
    return values


@pytest.mark.parametrize("quant", [{}, QUANT])
def test_bytes_are_the_closed_form(quant: dict[str, str]) -> None:
    """8 ranks: 2 nodes of 2 packages of 2; by node, and by package."""
    n, g0, g1, micro = 8, 2, 4, 2
    one = job(
        {"dp": n}, shard=topo3(g0, g1, quant=quant), global_batch=16, microbatch=1, recompute="full"
    )

    def weight(size: tuple[int, bool], parts: int = 1) -> int:
        values, vectors = size
        return parts * (packed_bytes(values, 8) if quant and not vectors else 4 * values)

    def grad(size: tuple[int, bool], parts: int = 1) -> int:
        values, vectors = size
        return packed_bytes(parts * values, 4) if quant and not vectors else 4 * parts * values

    k, q = n // g1, g1 // g0
    for per, inside in ((4, "node"), (2, "package")):
        for totals, sizes, _ in train(one, ranks_per_node=per):
            blocks = LAYERS * (2 if quant else 1)
            # Blocks are gathered twice, because of recomputation; what is around them once.
            gathers = [2 * micro] * blocks + [micro] * (len(sizes) - blocks)
            package = sum(
                (g0 - 1) * k * q * weight(s) * times
                for s, times in zip(sizes, gathers, strict=True)
            )
            peers = sum((q - 1) * k * weight(s) for s in sizes)
            across = sum((k - 1) * (weight(s) + grad(s)) for s in sizes)
            island = sum(micro * (g1 - 1) * grad(s, k) for s in sizes)
            result = bytes_by_scope(totals, ("parameters", "gradients"))
            assert sum(result.values()) == pytest.approx(package + peers + across + island)
            if inside == "node":
                assert result["node"] == pytest.approx(across)
            else:  # the package's own gathers never leave it
                assert result["loopback"] >= package


def test_memory_is_the_formula() -> None:
    """2 psi / g0 + 2 psi / g1 + 12 psi / n in bf16, with rows padded to the ranks."""
    n, g0, g1 = 8, 2, 4
    one = job({"dp": n}, shard=topo3(g0, g1, dtype="bf16"), microbatch=1)

    def hook(engine: ParallelEngine) -> dict[str, int]:
        assert isinstance(engine.sharded, LevelledModel)
        return engine.sharded.held_bytes()

    psi = sum(math.prod(p.shape) for p in SeededWeights(config()).model().parameters())
    for _, sizes, held in train(one, hook=hook):
        mine = sum(size for size, _ in sizes)
        assert held == {
            "weights": 2 * mine * n // g0,
            "gradients": 2 * mine * n // g1,
            "masters": 4 * mine,  # and twice as much for the moments
        }
        assert psi <= mine * n < 1.35 * psi  # the model is tiny: few rows for eight ranks
    part = table("shard").build(one.shard)
    kept = part.kept_bytes(one, load("8xH100"), float(psi), 0.0)
    assert kept["weights"] == pytest.approx(psi * (2 / g0 + 4 / n))
    assert kept["gradients"] == pytest.approx(psi * 4 / g1 / 2)


def test_quantised_equals_its_simulation() -> None:
    """Two islands of two beside the same arithmetic in one process, bit for bit."""
    n, g1, rate = 4, 2, 0.5
    start = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    xs = torch.randn(3, n, 40, generator=torch.Generator().manual_seed(1))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (torch.nn.functional.linear(x, weight).tanh() * 0.5).square().sum()

    def run(comm: ThreadComm) -> Tensor:
        model = torch.nn.Linear(40, 8, bias=False)
        with torch.no_grad():
            model.weight.copy_(start)
        part = table("shard").build(topo3(2, g1, quant=QUANT))
        sharded = part.apply(model, comm, whole_matrices=False)
        for step in range(3):
            with sharded.accumulate(last=True):
                (model(xs[step, comm.rank]).tanh() * 0.5).square().sum().backward()
            sharded.finish()
            (mine,) = sharded.owned().values()
            with torch.no_grad():
                mine.sub_(rate * mine.grad)
            sharded.publish()
        return mine.detach().clone()

    masters = start.view(n, -1).clone()
    size = masters.shape[1]
    for step in range(3):
        gradients = []
        for rank in range(n):
            weight = unpack(pack(masters, 8), size, 8).reshape(8, 40).requires_grad_()
            loss(xs[step, rank], weight).backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            gradients.append(weight.grad.view(n // g1, g1, size).transpose(0, 1).reshape(g1, -1))
        for rank in range(n):
            k, j = divmod(rank, g1)
            hops = []
            for island in range(n // g1):
                members = range(island * g1, (island + 1) * g1)
                rows = torch.stack(
                    [unpack(pack(gradients[m], 4), 2 * size, 4)[j] for m in members]
                ).sum(0)
                hops.append(unpack(pack(rows.view(n // g1, size), 4), size, 4)[k])
            total = torch.stack(hops).sum(0)
            masters[rank] -= rate * total
    for rank, mine in enumerate(run_ranks(n, run)):
        assert torch.equal(mine.view(-1), masters[rank])


def test_levels_are_switches() -> None:
    """[n, n] gathers and scatters as zero3 does; a second copy keeps recomputation at home."""

    def sent(shard: Any) -> dict[str, float]:
        one = job({"dp": 4}, shard=shard, global_batch=4, microbatch=1, recompute="full")
        ranks = train(one, ranks_per_node=2)
        total: dict[str, float] = {}
        for totals, *_ in ranks:
            for scope, value in bytes_by_scope(totals, ("parameters", "gradients")).items():
                total[scope] = total.get(scope, 0.0) + value
        return total

    zero3, ours = sent("zero3"), sent(topo3(4, 4))
    assert ours == pytest.approx(zero3)
    second = sent(topo3(4, 4, secondary=2))
    assert second["node"] < 0.8 * zero3["node"]
    assert sent(topo3(2, 2))["node"] < 0.5 * zero3["node"]


def test_estimate_counts_what_is_metered() -> None:
    """Bytes by level of a job whose rows need no padding, beside those of the hops."""
    one = job({"dp": 8}, shard=topo3(2, 4), global_batch=16, microbatch=1)
    work = Work(shape=config().shape(), job=one)
    part = table("shard").build(one.shard)
    machine = load("2xFrontier").model_copy(update={"devices_per_node": 4})
    fields = {hop.name: hop for hop in hops(part, work, machine)}
    assert [fields[name].members for name in fields] == [2, 4, 2, 2, 2]
    scopes = [hop.link.scope for hop in fields.values() if hop.link is not None]
    assert scopes == ["package", "device", "node", "node", "device"]
    psi = 4 * shape_parameters()
    assert fields["gradients across"].sent == pytest.approx(psi / 4 / 2)
    assert fields["weights of a package"].sent == pytest.approx(2 * 2 * psi / 2)
    cost = part.estimate(work, machine)
    assert cost.wire_bytes["node"] == pytest.approx(2 * psi / 4 / 2)


def shape_parameters() -> float:
    from shoal.cost.arithmetic import parameters

    return float(parameters(config().shape()))


def test_ranks_that_lie_apart() -> None:
    split = Parallel(dp=4, tp=2, pp=2)
    assert [span(split, count) for count in (1, 2, 4)] == [1, 3, 7]
    assert span(Parallel(dp=4, pp=2, order="dp-pp-cp-tp"), 2) == 3
    assert span(Parallel(dp=2, cp=2, tp=2), 4) == 7


def test_planner_knows_it() -> None:
    from shoal.ir import TrainJob

    machine = load("4xFrontier")
    plain = TrainJob(model="Llama-3-8B", seq_len=2048, global_batch=64, tokens=10**9)
    choices = sharding_choices(plain, Parallel(dp=32), machine)
    levels = [choice.options["levels"] for choice in choices if choice.name == "topo3"]
    assert levels == [(2, 8), (8, 8)]
    assert not [c for c in sharding_choices(plain, Parallel(dp=8), machine) if c.name == "topo3"]
    stated = plain.model_copy(update={"shard": Choice(name="topo3", options={"levels": [2, 8]})})
    assert [len(sharding_choices(stated, Parallel(dp=dp), machine)) for dp in (4, 8, 24)] == [
        0,
        1,
        1,
    ]
    assert [table("shard").build("topo3").sizes(n, 8) for n in (4, 12, 16)] == [(4, 4)] * 2 + [
        (8, 8)
    ]
    cost = Pricer(machine)

    def made(shard: Any) -> Any:
        update = {"parallel": Parallel(dp=32), "microbatch": 2, "recompute": "full"}
        chosen = TrainJob.model_validate({**plain.model_dump(mode="json"), "shard": shard})
        return Work(shape=shape_of(plain), job=chosen.model_copy(update=update))

    zero3, ours = cost.estimate(made("zero3")), cost.estimate(made(topo3(2, 8)))
    assert ours.wire_bytes["node"] < zero3.wire_bytes["node"] / 4
    assert ours.terms_s["collective"] < zero3.terms_s["collective"]
    assert ours.memory_bytes["weights"] > 4 * zero3.memory_bytes["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [3, 8]}, r"levels = \[3, 8\]: expected two numbers of ranks, the first a div"),
        ({"levels": [4, 2]}, r"levels = \[4, 2\]"),
        ({"levels": [0, 2]}, r"levels = \[0, 2\]"),
        ({"levels": [4]}, "levels"),
        ({"levels": [4, 8], "secondary": 3}, "secondary = 3: expected a divisor of the 4"),
        ({"quant": {"masters": "int8"}}, "masters .* never leave their rank"),
        ({"quant": {"optimizer": "int8"}}, "quantise weights or grads"),
        ({"quant": {"weights": "int4"}}, "quant.weights = 'int4': expected int8"),
        ({"quant": {"activations": "int8"}}, "quant = 'activations': expected weights or grads"),
        ({"dtype": "fp8"}, "dtype"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table("shard").build({"name": "topo3", **options})


def test_bad_jobs() -> None:
    with pytest.raises(
        PlanError, match=r"levels = \[2, 4\]: expected .* the 6 data-parallel ranks"
    ):
        check_split(job({"dp": 6}, shard=topo3(2, 4), global_batch=12), config().shape())
    with pytest.raises(PlanError, match="compile"):
        check_split(job({"dp": 4}, shard=topo3(2, 4), compile=True), config().shape())
    part = table("shard").build(topo3(2, 4))
    with pytest.raises(ConfigError, match="the 2 data-parallel ranks"):
        run_ranks(2, lambda c: part.apply(torch.nn.Linear(2, 2), c, whole_matrices=False))
    with pytest.raises(ConfigError, match="whole matrices"):
        run_ranks(4, lambda c: part.apply(torch.nn.Linear(2, 2), c, whole_matrices=True))


def test_packages_of_a_machine() -> None:
    from shoal.core.errors import MachineError

    machine = load("Frontier")
    assert isinstance(machine.link("package"), Link)
    with pytest.raises(MachineError, match="devices_per_package = 3"):
        type(machine).model_validate({**machine.model_dump(), "devices_per_package": 3})
    links = [link.model_dump() for link in machine.links if link.scope != "package"]
    with pytest.raises(MachineError, match="no link of scope package"):
        type(machine).model_validate({**machine.model_dump(), "links": links})
