"""Two calls: modules, optimizers, trees, flat buffers and loaders; saved and loaded."""

from __future__ import annotations

import copy
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import checkpoint
from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.states import FlatBuffer, FlatPart, OptimizerState, StateSource
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import CheckpointError


class Net(nn.Module):
    """Two layers, a buffer, and a weight with two names."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = self.head(self.norm(self.embed(x)))
        return tensor


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.arange(8) + step
        loss = nn.functional.cross_entropy(model(x % 11), (x + 1) % 11)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def made(seed: int, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    model = Net(seed)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
    ],
)
@pytest.mark.parametrize("mode", list(SAVE_MODES))
def test_training_goes_on_bit_equal(
    tmp_path: Path, mode: str, kind: Any, options: dict[str, Any]
) -> None:
    one = made(0, kind, **options)
    train(one["model"], one["optimizer"])
    one["scheduler"].step()
    ticket = checkpoint.save(tmp_path, {**one, "extra": {"epoch": 3}}, step=2, mode=mode)
    # Under way or not, what is saved is what was there.
    train(one["model"], one["optimizer"])
    ticket.wait(30)
    two = made(1, kind, **options)
    extra: dict[str, Any] = {}
    report = checkpoint.load(tmp_path, {**two, "extra": extra})
    assert extra == {"epoch": 3} and report.step == 2 and report.read_bytes
    assert two["scheduler"].state_dict()["last_epoch"] == 1
    train(two["model"], two["optimizer"])
    for name, value in one["model"].state_dict().items():
        assert torch.equal(value, two["model"].state_dict()[name]), name


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": Net(0)})
    with checkpoint.Checkpoints(tmp_path) as opened:
        names = opened.store.open(0).names()
    assert "model.embed.weight" in names and "model.head.weight" not in names


def test_a_tree_comes_back_with_its_names(tmp_path: Path) -> None:
    weights = {"layers.0.w": torch.randn(3, 2), "nested": {"x": torch.tensor(2)}}
    tree = {**weights, "plain": {"a.b": [1, 2]}, "text": "yes", "nothing": {}}
    checkpoint.save(tmp_path, {"weights": tree}, step=1)
    empty: dict[str, Any] = {}
    checkpoint.load(tmp_path, {"weights": empty})
    assert torch.equal(empty["layers.0.w"], weights["layers.0.w"])  # type: ignore[arg-type]
    assert empty["nested"]["x"] == 2 and empty["plain"] == {"a.b": [1, 2]}
    assert empty["text"] == "yes" and empty["nothing"] == {}
    filled = {"layers.0.w": torch.zeros(3, 2)}
    place = filled["layers.0.w"]
    checkpoint.load(tmp_path, {"weights": filled})
    assert filled["layers.0.w"] is place and torch.equal(place, empty["layers.0.w"])


def test_flat_buffers_cut_anywhere_load_into_whole_tensors(tmp_path: Path) -> None:
    a, b = torch.arange(15.0).view(3, 5), torch.arange(7.0) + 100
    flat = torch.cat([a.view(-1), b, torch.zeros(2)])
    cuts = [(0, 9), (9, 18), (18, 24)]

    def source(rank: int, buffer: torch.Tensor) -> FlatBuffer:
        low, high = cuts[rank]
        parts = []
        for name, shape, start, size in (("a", (3, 5), 0, 15), ("b", (7,), 15, 7)):
            first, last = max(low, start), min(high, start + size)
            if first < last:
                parts.append(FlatPart(name, shape, first - start, first - low, last - first))
        return FlatBuffer(buffer, parts)

    def save(comm: ThreadComm) -> None:
        low, high = cuts[comm.rank]
        mine = source(comm.rank, flat[low:high].clone())
        checkpoint.save(tmp_path, {"zero": mine}, comm=comm)

    def load(comm: ThreadComm) -> torch.Tensor:
        low, high = cuts[comm.rank]
        buffer = torch.zeros(high - low)
        checkpoint.load(tmp_path, {"zero": source(comm.rank, buffer)}, comm=comm)
        return buffer

    run_ranks(3, save, timeout_s=20)
    whole = {"a": torch.zeros(3, 5), "b": torch.zeros(7)}
    checkpoint.load(tmp_path, {"zero": whole})
    assert torch.equal(whole["a"], a) and torch.equal(whole["b"], b)
    assert torch.equal(torch.cat(run_ranks(3, load, timeout_s=20))[:22], flat[:22])


def test_ranks_with_copies_save_and_read_them_once() -> None:
    place = f"memory://{uuid.uuid4().hex}"

    def rank(comm: ThreadComm) -> tuple[int, int]:
        one = made(0)
        train(one["model"], one["optimizer"])
        ticket = checkpoint.save(place, one, mode="snapshot", comm=comm)
        ticket.wait(20)
        comm.barrier()
        two = made(1)
        report = checkpoint.load(place, two, comm=comm)
        for name, value in one["model"].state_dict().items():
            assert torch.equal(value, two["model"].state_dict()[name])
        return ticket.bytes, report.read_bytes

    # One thread at a time builds and trains: torch's default generator is one for all.
    ranks = run_ranks(2, rank, timeout_s=30)
    size = sum(p.nbytes for p in Net(0).state_dict(keep_vars=True).values())
    assert sum(read for _, read in ranks) < 4 * size  # once: weights, two moments


@pytest.mark.slow
def test_a_program_that_ends_has_saved_what_it_began(tmp_path: Path) -> None:
    program = (
        "import torch; from shoal import checkpoint\n"
        "state = {'x': {'w': torch.arange(5_000_000)}}\n"
        f"checkpoint.save({str(tmp_path)!r}, state, step=4, mode='snapshot')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    tree: dict[str, Any] = {}
    assert checkpoint.load(tmp_path, {"x": tree}).step == 4
    assert torch.equal(tree["w"], torch.arange(5_000_000))


def test_my_own_source(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, count: int) -> None:
            self.values = torch.tensor([count])

        def shards(self) -> Any:
            return {"values": Piece.whole(self.values)}

        def plain(self) -> Any:
            return {"unit": "tokens"}

        def wanted(self, stored: Any) -> Any:
            assert stored.names() == ["values"] and stored.shape("values") == (1,)
            return {"values": [Piece.whole(self.values)]}

        def loaded(self, plain: Any) -> None:
            self.unit = plain["unit"]

    assert isinstance(Counter(1), StateSource)
    for state in (lambda c: {"count": c}, lambda c: c):
        again = Counter(0)
        checkpoint.save(tmp_path, state(Counter(41)), meta={"who": "me"})
        checkpoint.load(tmp_path, state(again))
        assert again.values == 41 and again.unit == "tokens"


def test_keep_and_steps(tmp_path: Path) -> None:
    with checkpoint.Checkpoints(tmp_path, keep=2) as opened:
        tickets = [opened.save(step, {"x": {"t": torch.tensor(step)}}) for step in (1, 2, 3)]
        assert [ticket.fresh_plan for ticket in tickets] == [True, False, False]
        assert opened.store.steps() == (2, 3)
        for step in (2, 3):
            tree = {"t": torch.tensor(0)}
            assert opened.load({"x": tree}, step=step).step == step and tree["t"] == step


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint was saved here"):
        checkpoint.load(tmp_path / "none", {"model": Net(0)})
    with pytest.raises(CheckpointError, match="thing: int cannot be saved; give a module"):
        checkpoint.save(tmp_path, {"thing": 3})
    with pytest.raises(CheckpointError, match=r"a\.b.*one value for it"):
        checkpoint.save(tmp_path, {"t": {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}})
    with pytest.raises(CheckpointError, match="names without dots"):
        checkpoint.save(tmp_path, {"a.b": {}})
    with pytest.raises(CheckpointError, match="not plain data"):
        checkpoint.save(tmp_path, {"extra": {"what": object()}})
    with pytest.raises(CheckpointError, match="expected a dict"):
        checkpoint.save(tmp_path, 3)  # type: ignore[arg-type]
    checkpoint.save(tmp_path, {"model": nn.Linear(3, 2)})
    with pytest.raises(CheckpointError, match=r"has shape \[2, 3\], and \[2, 4\] is wanted"):
        checkpoint.load(tmp_path, {"model": nn.Linear(4, 2)})
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model\.embed\.weight'"):
        checkpoint.load(tmp_path, {"model": Net(0)})
    with pytest.raises(CheckpointError, match=r"is float32, .* float64; give cast=True"):
        checkpoint.load(tmp_path, {"model": nn.Linear(3, 2).double()})
    checkpoint.load(tmp_path, {"model": nn.Linear(3, 2).double()}, cast=True)


def test_what_one_rank_cannot_load_all_are_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": {"w": torch.zeros(3)}})

    def rank(comm: ThreadComm) -> str:
        state = {"x": {"w": torch.zeros(3)}} if comm.rank else {"x": 3}
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(tmp_path, state, comm=comm)
        return str(caught.value)

    first, second = run_ranks(2, rank, timeout_s=20)
    assert first.startswith("x: int cannot be saved") and second == f"rank 0: {first}"


def test_an_optimizer_whose_rate_is_a_tensor(tmp_path: Path) -> None:
    def build(rate: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"m": model, "o": torch.optim.Adam(model.parameters(), lr=torch.tensor(rate))}

    checkpoint.save(tmp_path, build(0.25))
    again = build(0.5)
    checkpoint.load(tmp_path, again)
    assert again["o"].param_groups[0]["lr"] == 0.25


def test_parameters_of_no_module_have_numbers() -> None:
    free = [torch.zeros(2, requires_grad=True)]
    optimizer = torch.optim.SGD(free, lr=1.0, momentum=0.5)
    free[0].grad = torch.ones(2)
    optimizer.step()
    assert set(OptimizerState(optimizer, {}).shards()) == {"group-0.0.momentum_buffer"}
    assert copy.deepcopy(OptimizerState(optimizer, {}).plain())["groups"][0]["momentum"] == 0.5
