"""A step that is not finite says which ranks hold what: gradients, weights, or rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.same_as_one import SeededWeights, tokens  # noqa: E402
from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import NonFiniteError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.ir import TrainJob, TrainPlan  # noqa: E402
from shoal.memory.protocols import EarlyUpdater  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.parallel.engine import ParallelEngine  # noqa: E402
from shoal.parallel.legal import check_split  # noqa: E402
from shoal.parallel.tensor.rows import ReplicaSequences  # noqa: E402
from shoal.train.finite import bad_gradients, bad_loss  # noqa: E402
from shoal.train.layout import RunDir  # noqa: E402
from shoal.train.run import execute, prepare_run  # noqa: E402

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden=64,
    max_position=32,
)
LAST = "blocks.1.mlp.down_proj.weight"
NAN = float("nan")

Spoil = Callable[[ParallelEngine, int], None]


def described(
    place: Path, before: Spoil, after: Spoil, what: str, **changes: Any
) -> tuple[list[str], float]:
    """What every rank says after one backward pass, and the norm."""
    job = TrainJob(
        **{
            "model": "shoal-0.3m",
            "seq_len": 16,
            "global_batch": 4,
            "microbatch": 1,
            "precision": "fp32",
            "grad_clip": 0,
            "steps": 1,
            **changes,
        }
    )

    def rank(comm: Any) -> tuple[str, float]:
        engine = ParallelEngine(
            job,
            check_split(job, CONFIG.shape()),
            SeededWeights(CONFIG, job.seed),
            comm,
            place=place,
        )
        optimizer = table("optimizer").build(job.optimizer)
        updater = engine.updater(optimizer)
        if isinstance(updater, EarlyUpdater):
            updater.begin(1.0)
        before(engine, comm.rank)
        whole = tokens(job, CONFIG.vocab_size, 0, documents=False)
        size = job.global_batch // engine.replicas
        part = slice(engine.replica * size, (engine.replica + 1) * size)
        rows = ReplicaSequences(whole.inputs[part], whole.targets[part], None, part.start, 0)
        loss = engine.backward(rows, 1, int((whole.targets != -100).sum()))
        engine.finish()
        after(engine, comm.rank)
        norm = float(engine.grad_norm())
        if what == "gradients":
            said = bad_gradients(engine, comm)
        else:
            said = bad_loss(engine, updater, comm, loss)
        for hook in engine.hooks:
            hook.close()
        return said, norm

    ranks = run_ranks(job.parallel.world, rank)
    return [said for said, _ in ranks], ranks[0][1]


def nothing(engine: ParallelEngine, rank: int) -> None:
    pass


def spoil_hooked(engine: ParallelEngine, rank: int) -> None:
    """From now on the gradient of one parameter is NaN on whichever rank computes it."""
    for name, parameter in engine.local.named_parameters():
        if name == LAST:
            parameter.register_hook(lambda gradient: gradient * NAN)


def spoil_owned(engine: ParallelEngine, rank: int) -> None:
    """One element of the last rank's part of a gradient is NaN."""
    parameter = engine.sharded.owned().get(LAST)
    if rank == 1 and parameter is not None:
        parameter.grad.view(-1)[0] = NAN


@pytest.mark.parametrize(
    ("changes", "spoil", "ranks"),
    [
        ({}, spoil_hooked, "rank 0"),
        ({"parallel": {"dp": 2}}, spoil_hooked, "ranks 0, 1"),
        ({"parallel": {"dp": 2}, "shard": "zero1"}, spoil_hooked, "ranks 0, 1"),
        ({"parallel": {"dp": 2}, "shard": "zero2"}, spoil_owned, "rank 1"),
        ({"parallel": {"dp": 2}, "shard": "zero3"}, spoil_owned, "rank 1"),
        ({"parallel": {"tp": 2}}, spoil_owned, "rank 1"),
        ({"parallel": {"pp": 2}}, spoil_hooked, "rank 1"),
        ({"offload": {"name": "deep_optimizer_states"}}, spoil_hooked, "rank 0"),
    ],
    ids=["alone", "replicated", "zero1", "zero2", "zero3", "tp", "pp", "offload"],
)
def test_gradients_are_named_with_their_ranks(
    changes: dict[str, Any], spoil: Spoil, ranks: str, tmp_path: Path
) -> None:
    hooked = spoil is spoil_hooked
    spoils = (spoil, nothing) if hooked else (nothing, spoil)
    result, norm = described(tmp_path, *spoils, "gradients", **changes)
    assert norm != norm
    assert len(set(result)) == 1
    assert result[0].startswith(f"{ranks}: 1 of "), result
    assert result[0].endswith(f" gradients ({LAST})")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fuyou", "zero_infinity", "superpipeline"])
def test_gradients_in_tiers_are_named(name: str, tmp_path: Path) -> None:
    offload = {"name": name, "device_budget": "8MiB"}
    result, norm = described(tmp_path, spoil_hooked, nothing, "gradients", offload=offload)
    assert norm != norm
    assert result[0].startswith("rank 0: 1 of ") and LAST in result[0]


def test_weights_or_rows_are_named(tmp_path: Path) -> None:
    """Of a loss that is not finite, on two stages: the stage with the weight, or the last one."""

    def weight(engine: ParallelEngine, rank: int) -> None:
        if rank == 0:
            with torch.no_grad():
                engine.sharded.owned()["blocks.0.mlp.down_proj.weight"].view(-1)[0] = NAN

    split = {"parallel": {"pp": 2}}
    result, _ = described(tmp_path, weight, nothing, "loss", **split)
    assert result[0].startswith("rank 0: 1 of "), result
    assert result[0].endswith(" weights (blocks.0.mlp.down_proj.weight)")

    def restored(engine: ParallelEngine, rank: int) -> None:
        with torch.no_grad():
            for parameter in engine.sharded.owned().values():
                parameter.nan_to_num_(0.0)

    result, _ = described(tmp_path, weight, restored, "loss", **split)
    assert set(result) == {"rank 1: the loss of its rows"}
    result, _ = described(tmp_path, nothing, nothing, "loss", **split)
    assert set(result) == {""}


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_whose_loss_is_not_finite_names_them(
    make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    # The first update makes weights infinite; its loss and gradients are finite.
    plan = make_plan(
        model="shoal-0.3m",
        optimizer={"name": "adamw", "lr": 1e45},
        steps=4,
        parallel={"pp": 2},
        checkpoint={"every": 0},
    )
    said = r"step 1: the loss is nan; not finite: rank 0: \d+ of \d+ weights \(.+\); rank 1: \d+ of"
    with pytest.raises(NonFiniteError, match=said):
        execute(plan, tmp_path / "run")


# A rank of a run; from step 2 on an element of the last rank's part of a gradient is NaN.
_SPOILED = """
import sys
from pathlib import Path
from shoal.core.errors import NonFiniteError
from shoal.parallel.engine import ParallelEngine
from shoal.train.layout import RunDir
from shoal.train.worker import run_rank

finish, steps = ParallelEngine.finish, []

def spoiled(self):
    finish(self)
    steps.append(0)
    if len(steps) == 3 and self.ranks.world.rank == 1:
        self.sharded.owned()[NAME].grad.to_local().view(-1)[0] = float("nan")

ParallelEngine.finish = spoiled
try:
    run_rank(RunDir(Path(sys.argv[1])), resume=False)
except NonFiniteError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_whose_gradients_are_not_finite_names_them(
    make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    """Divided between processes, where gradients are distributed tensors."""
    plan = make_plan(model="shoal-0.3m", steps=4, parallel={"dp": 2}, shard="zero2")
    run = RunDir(tmp_path / "run")
    prepare_run(plan, run, resume=False)
    name = "blocks.1.mlp.down_proj.weight"
    code = _SPOILED.replace("NAME", repr(name))
    world = {"WORLD_SIZE": "2", "SHOAL_RENDEZVOUS": f"file://{tmp_path}/met"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(run.root)],
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert said[0] == said[1]
    assert re.match(
        r"step 2: the norm of the gradients is nan; not finite: rank 1: 1 of \d+ gradients "
        rf"\({re.escape(name)}\); lower optimizer\.lr",
        said[0],
    ), said[0]
