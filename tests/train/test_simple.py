"""The three-function trainer: the same numbers on any ranks, saved and resumed, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import CheckpointError, ConfigError
from shoal.parallel.comm.processes import run_processes
from shoal.train.simple import Trainer

EXAMPLES = [
    (torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64), i % 4)
    for i in range(22)
]


def collate(examples: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in examples]), torch.tensor([y for _, y in examples])


def loss(model: Any, batch: Any, train: bool) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def pred(model: Any, batch: Any) -> Tensor:
    tensor: Tensor = model(batch[0])
    return tensor


def metrics(predictions: Tensor, examples: Any) -> dict[str, float]:
    truth = torch.tensor([y for _, y in examples])
    return {"accuracy": float((predictions.argmax(-1) == truth).double().mean())}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def trainer(comm: Any, parallel: Any = "auto", **options: Any) -> Trainer:
    model = options.pop("model")
    return Trainer(
        model,
        collate,
        loss,
        pred,
        metrics=metrics,
        parallel=parallel,
        lr=1e-2,
        batch=8,
        comm=comm,
        **options,
    )


def on_ranks(split: dict[str, int], run: Any) -> Any:
    world = split.get("dp", 1) * split.get("tp", 1)
    models = [made() for _ in range(world)]
    results = run_ranks(world, lambda c: run(trainer(c, split, model=models[c.rank])))
    return results[0]


def trained(at: Trainer) -> tuple[list[dict[str, float]], Tensor]:
    rows = at.fit(EXAMPLES, epochs=2, evaluate=EXAMPLES[:9])
    return rows, at.predict(EXAMPLES[:9])


def on_process(comm: Any, split: dict[str, int]) -> Any:
    """Runs in a process of its own."""
    rows, predictions = trained(trainer(comm, split, model=made()))
    return rows, predictions.tolist()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_is_reached_from_the_package() -> None:
    assert shoal.Trainer is Trainer
    with pytest.raises(AttributeError, match="no attribute 'Trainers'"):
        _ = shoal.Trainers


@pytest.mark.parametrize("split", [{"dp": 2}, {"tp": 2}], ids=str)
def test_is_the_same_on_any_ranks(split: dict[str, int]) -> None:
    expected, rows = on_ranks({"dp": 1}, trained)
    result, predictions = on_ranks(split, trained)
    assert [row["step"] for row in result] == [3.0, 6.0]
    for one, other in zip(expected, result, strict=True):
        assert other == pytest.approx(one, rel=1e-9)
    torch.testing.assert_close(predictions, rows)


@pytest.mark.slow
@pytest.mark.multi
def test_is_the_same_on_four_processes() -> None:
    """Both degrees at once; groups trace at different times, which threads could not."""
    expected, predictions = on_ranks({"dp": 1}, trained)
    processes = run_processes(f"{Path(__file__)}:on_process", 4, {"split": {"dp": 2, "tp": 2}})
    for rows, said in processes:
        for one, other in zip(expected, rows, strict=True):
            assert other == pytest.approx(one, rel=1e-9)
        torch.testing.assert_close(torch.tensor(said, dtype=torch.float64), predictions)


def test_is_saved_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    file = tmp_path / "half.safetensors"

    def half(at: Trainer) -> None:
        at.fit(EXAMPLES, epochs=2, steps=4)
        at.save(file)

    def rest(at: Trainer) -> Tensor:
        at.load(file)
        assert at.step == 4
        at.fit(EXAMPLES, epochs=2)
        assert at.step == 6
        return at.predict(EXAMPLES)

    expected = on_ranks({"dp": 1}, trained)[1]
    for before, after in (({"dp": 1}, {"tp": 2}), ({"tp": 2}, {"dp": 2})):
        on_ranks(before, half)
        ranks = on_ranks(after, rest)
        torch.testing.assert_close(ranks[:9], expected)


def test_splits_by_memory() -> None:
    from shoal.train.simple import _degrees

    assert _degrees("auto", made(), 4) == (4, 1)
    huge = nn.Linear(2, 2)
    huge.weight = nn.Parameter(torch.zeros(()).expand(1 << 20, 1 << 20))
    assert _degrees("auto", huge, 4) == (1, 4)
    assert _degrees({"tp": 2}, huge, 4) == (2, 2)


def test_refuses_with_a_reason(tmp_path: Path) -> None:
    one = trainer(None, model=made())
    with pytest.raises(ConfigError, match="examples = 0"):
        one.fit([])
    with pytest.raises(CheckpointError, match="cannot be read"):
        one.load(tmp_path / "none")
    one.save(tmp_path / "mlp")
    other = trainer(None, model=nn.Linear(6, 4).double())
    with pytest.raises(CheckpointError, match="are not the model's"):
        other.load(tmp_path / "mlp")
    for options, said in (
        ({"parallel": {"tp": 2}}, "a divisor of 1 ranks"),
        ({"parallel": {"dp": 2}}, "dp x tp = 1"),
        ({"parallel": {"pp": 1}}, "the keys dp and tp"),
        ({"parallel": "all"}, "auto, or degrees"),
        ({"batch": 0}, "batch = 0"),
        ({"lr": 0.0}, "lr = 0.0"),
    ):
        given: dict[str, Any] = {"parallel": "auto", **options}
        with pytest.raises(ConfigError, match=said):
            Trainer(made(), collate, loss, **given)
    with pytest.raises(ConfigError, match="pred = None"):
        Trainer(made(), collate, loss).predict(EXAMPLES)
    vector = Trainer(made(), collate, lambda model, batch, train: model(batch[0]))
    with pytest.raises(ConfigError, match="expected a scalar tensor"):
        vector.fit(EXAMPLES)
    short = Trainer(made(), collate, loss, lambda model, batch: model(batch[0]).mean())
    with pytest.raises(ConfigError, match="one for each example"):
        short.predict(EXAMPLES)
