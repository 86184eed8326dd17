"""Every operation between real processes, and sharding over groups of them and of threads."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError
from shoal.core.meter import Meter
from shoal.core.parts import table
from shoal.parallel.comm.collectives import TorchComm

Tensors = dict[str, torch.Tensor]


def _ranks_sharding() -> Any:
    place = Path(__file__).with_name("ranks_sharding.py")
    spec = importlib.util.spec_from_file_location("ranks_sharding_threads", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANKS = _ranks_sharding()


def assembled(parts: list[Tensors]) -> Tensors:
    """Whole parameters from the parts that ranks write."""
    result: Tensors = {}
    for held in parts:
        for name, tensor in held.items():
            if name.endswith(("@", "!")) or name == "norms" or not bool(held[f"{name}!"]):
                continue
            place = held[f"{name}@"].tolist()
            offset, shape = place[: tensor.dim()], place[tensor.dim() :]
            full = result.setdefault(name, torch.full(shape, float("nan"), dtype=tensor.dtype))
            box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            assert bool(full[box].isnan().all()), f"{name}: written twice"
            full[box] = tensor
        result["norms"] = held["norms"]
    return result


def one_rank() -> Tensors:
    return assembled(run_ranks(1, lambda comm: RANKS.train("replicated", "adamw", comm)))


def assert_same(found: Tensors, expected: Tensors, what: object) -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=f"{what} {name}")


@pytest.mark.multi
@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    program = Path(__file__).with_name("ranks_comm.py")
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", program, tmp_path],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",  # two emulated nodes
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for rank in range(4)
    ]
    assert [child.wait(timeout=240) for child in children] == [0] * 4
    assert len(list(tmp_path.glob("done-*"))) == 4
    expected = one_rank()
    for name, groups in {
        "zero1": ((0, 2), (1, 3)),
        "zero2": ((0, 2), (1, 3)),
        "zero3": ((0, 2), (1, 3)),
        "hybrid": ((0, 1, 2, 3),),
    }.items():
        for group in groups:
            parts = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in group]
            assert_same(assembled(parts), expected, (name, group))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "shard", ["replicated", "zero1", "zero2", "zero3", {"name": "hybrid", "within": 2}]
)
def test_threads_equal_one_rank(shard: Any, overlap: bool) -> None:
    expected = one_rank()
    for world in (2, 4):
        parts = run_ranks(world, lambda c: RANKS.train(shard, "adamw", c, overlap=overlap))
        assert_same(assembled(parts), expected, (shard, world))


def test_bytes_of_sharding_on_threads() -> None:
    """Two gathers a micro-batch without stage 2's memory, one a step with it."""

    def bytes_of(shard: Any, comm: ThreadComm) -> dict[str, float]:
        RANKS.train(shard, "adamw", comm, steps=1)
        values: dict[str, float] = {}
        for key, value in comm.meter.totals().items():
            if "tag=norm" not in key:
                values[key.split("op=")[1].split(",")[0]] = value
        return values

    # Rows are padded to a multiple of the ranks: 12 of 11, 6 of 6, 6 of 5; 8 bytes each.
    padded = 8 * (12 * 6 + 3 * (6 * 6 + 6) + 6)
    two = run_ranks(2, lambda c: bytes_of("zero2", c))[0]
    assert two == {"all_gather": padded / 2, "reduce_scatter": padded / 2}
    three = run_ranks(2, lambda c: bytes_of("zero3", c))[0]
    assert three == {"all_gather": 2 * padded / 2, "reduce_scatter": padded / 2}
    hybrid = run_ranks(4, lambda c: bytes_of({"name": "hybrid", "within": 2}, c))[0]
    # Of the gradients a rank keeps half, and half of an all-reduce of two is twice a half.
    assert hybrid == {
        "all_gather": padded / 2,
        "reduce_scatter": padded / 2,
        "all_reduce": padded / 2,
    }


def test_recomputed_blocks_gather_again() -> None:
    from torch.utils.checkpoint import checkpoint

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(checkpoint(block, x, use_reentrant=False))
            return x

    weight = torch.arange(16.0).view(4, 4) / 16
    x = torch.arange(8.0).view(2, 4)

    def deep() -> Deep:
        model = Deep()
        with torch.no_grad():
            for block in model.blocks:
                block.weight.copy_(weight)
        return model

    one = deep()
    (2 * one(x).sum()).backward()

    def run(comm: ThreadComm) -> dict[str, float]:
        model = deep()
        sharded = table("shard").build("zero3").apply(model, comm, whole_matrices=False)
        with sharded.accumulate(last=True):
            model(x).sum().backward()
        sharded.finish()
        for name, parameter in one.named_parameters():
            mine = sharded.owned()[name].grad
            rows = slice(2 * comm.rank, 2 * comm.rank + 2)
            assert parameter.grad is not None
            torch.testing.assert_close(mine, parameter.grad[rows])
        whole = sum(float(p.grad.square().sum()) for p in one.parameters() if p.grad is not None)
        assert float(sharded.squared_norm(lambda _: True)) == pytest.approx(whole)
        first = one.blocks[0].weight.grad
        chosen = sharded.squared_norm(lambda name: name.startswith("blocks.0"))
        assert float(chosen) == pytest.approx(float(first.square().sum()))
        return comm.meter.totals()

    totals = run_ranks(2, run)[0]
    assert totals["wire_bytes{op=all_gather,scope=loopback,tag=parameters}"] == 2 * 2 * 32
    assert totals["wire_bytes{op=reduce_scatter,scope=loopback,tag=gradients}"] == 2 * 32


def test_a_gradient_after_its_bucket_is_an_error() -> None:
    """Two last passes add to one parameter: only without overlap is that a sum."""
    from shoal.core.errors import RankError

    def run(comm: ThreadComm, overlap: bool) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        sharded = table("shard").build("replicated").apply(model, comm, whole_matrices=False)
        sharded.overlap = overlap
        for _ in range(2):
            with sharded.accumulate(last=True):
                model(torch.ones(1, 1)).sum().backward()
        sharded.finish()
        assert model.weight.grad is not None
        return float(model.weight.grad)

    assert run_ranks(2, lambda c: run(c, False)) == [4.0, 4.0]
    with pytest.raises(RankError, match="set overlap = False"):
        run_ranks(2, lambda c: run(c, True))


def test_bad_hybrid() -> None:
    with pytest.raises(ConfigError, match=r"shard\.hybrid\.within = 1: expected 2 ranks or more"):
        table("shard").build({"name": "hybrid", "within": 1})
    part = table("shard").build({"name": "hybrid", "within": 3})
    with pytest.raises(ConfigError, match=r"within = 3: expected a divisor of the 4"):
        run_ranks(4, lambda c: part.apply(torch.nn.Linear(2, 2), c, whole_matrices=False))
    alone = table("shard").build("hybrid")
    with pytest.raises(ConfigError, match=r"within = 1: expected a divisor of the 2"):
        run_ranks(
            2,
            lambda c: alone.apply(torch.nn.Linear(2, 2), c, whole_matrices=False),
            ranks_per_node=1,
        )


def test_each_start_under_an_agent_meets_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of torchrun keeps its store: addresses of the ranks before are not read."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stores: list[Any] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, *, store, **_: stores.append(store)
    )
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        with Meter([]) as meter:
            TorchComm(meter, rank=0, world=2, shared_memory=False)
    first, second = stores
    first.set("rank1", "an address")
    assert first.check(["rank1"])
    assert not second.check(["rank1"])
