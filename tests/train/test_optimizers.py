import copy
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest
import torch

from shoal.core.errors import CheckpointError, ConfigError
from shoal.core.parts import table
from shoal.train.optimizers import muon_step, torch_state
from shoal.train.optimizers.eager import EagerAdamW


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (7, 4), "blocks.0.weight": (4, 6), "norm": (4,)}
    return {
        name: torch.randn(shape, generator=generator, requires_grad=True)
        for name, shape in shapes.items()
    }


def gradients(params: dict[str, torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for tensor in params.values():
        tensor.grad = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def test_adamw_follows_the_paper() -> None:
    lr, b1, b2, eps, decay = 0.1, 0.9, 0.95, 1e-8, 0.1
    params = parameters()
    expected = {name: tensor.detach().clone() for name, tensor in params.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    updater = table("optimizer").build({"name": "adamw", "lr": lr}).build(params)
    for step in range(3):
        gradients(params, step)
        updater.step(0.5)
        for name, w in expected.items():
            g = params[name].grad
            assert g is not None
            first[name] = b1 * first[name] + (1 - b1) * g
            second[name] = b2 * second[name] + (1 - b2) * g * g
            m, v = first[name] / (1 - b1 ** (step + 1)), second[name] / (1 - b2 ** (step + 1))
            # Matrices are decayed, vectors are not.
            w -= 0.5 * lr * (m / (v.sqrt() + eps) + (decay * w if w.dim() > 1 else 0))
    for name, w in expected.items():
        assert torch.allclose(params[name], w, atol=1e-6), name


def test_muon_makes_blocks_matrices_orthogonal_and_leaves_the_rest_to_adamw() -> None:
    params = parameters()
    before = {name: tensor.detach().clone() for name, tensor in params.items()}
    choice = {"name": "muon", "lr": 0.1, "matrix_lr": 1.0, "weight_decay": 0.0}
    updater = table("optimizer").build(choice).build(params)
    gradients(params, 0)
    updater.step(1.0)
    update = (before["blocks.0.weight"] - params["blocks.0.weight"].detach()) / 0.1
    singular = torch.linalg.svdvals(update) / (0.2 * 6**0.5)
    assert float(singular.min()) > 0.5
    assert float(singular.max()) < 1.4
    # AdamW's first step moves every element by the rate.
    moved = (before["embedding"] - params["embedding"].detach()).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.1), rtol=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
@pytest.mark.parametrize("flags", [frozenset(), frozenset({"avx512_bf16"})])
def test_muon_takes_the_same_steps_on_every_cpu(
    shape: tuple[int, int], flags: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is PyTorch's own."""
    monkeypatch.setattr(muon_step, "cpu_flags", lambda: flags)
    torch.manual_seed(1)
    mine = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(mine.detach().clone())
    options = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    pair = (
        (mine, muon_step.MuonStep([mine], **options)),
        (theirs, torch.optim.Muon([theirs], **options)),
    )
    for _ in range(3):
        gradient = torch.randn(shape)
        for parameter, optimizer in pair:
            parameter.grad = gradient.clone()
            optimizer.step()
    # An element of an update is about 0.1 * 0.2; bf16 keeps 8 of its bits.
    assert torch.allclose(mine, theirs, rtol=0, atol=0 if flags else 2e-3)


def test_lamb_follows_the_paper_in_float64() -> None:
    lr, b1, b2, eps, decay = 0.01, 0.9, 0.95, 1e-6, 0.01
    params = {name: p.detach().double().requires_grad_() for name, p in parameters().items()}
    with torch.no_grad():
        params["norm"].zero_()  # without a norm the ratio is 1
    expected = {name: p.detach().clone() for name, p in params.items()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    updater = table("optimizer").build({"name": "lamb", "lr": lr}).build(params)
    for step in range(3):
        gradients(params, step)
        updater.step(0.5)
        for name, w in expected.items():
            g = params[name].grad
            assert g is not None
            first[name] = b1 * first[name] + (1 - b1) * g
            second[name] = b2 * second[name] + (1 - b2) * g * g
            m, v = first[name] / (1 - b1 ** (step + 1)), second[name] / (1 - b2 ** (step + 1))
            update = m / (v.sqrt() + eps) + (decay * w if w.dim() > 1 else 0)
            sizes = float(w.norm()), float(update.norm())
            w -= 0.5 * lr * (sizes[0] / sizes[1] if all(sizes) else 1.0) * update
    for name, w in expected.items():
        assert torch.allclose(params[name], w, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("option", [{"lr": 0}, {"beta1": 1.0}, {"eps": 0}, {"weight_decay": -1}])
def test_lamb_refuses_options(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.lamb.{next(iter(option))} = "):
        table("optimizer").build({"name": "lamb", **option})


@pytest.mark.parametrize("name", ["adamw", "muon", "lamb"])
def test_state_goes_round(name: str) -> None:
    straight, broken = parameters(), parameters()
    one = table("optimizer").build(name).build(straight)
    two = table("optimizer").build(name).build(broken)
    for step in range(4):
        if step == 2:
            saved = {n: {k: v.clone() for k, v in s.items()} for n, s in two.state().items()}
            two = table("optimizer").build(name).build(broken)
            two.load(saved)
        for params, updater in ((straight, one), (broken, two)):
            gradients(params, step)
            updater.step(1.0)
    for key in straight:
        assert torch.equal(straight[key], broken[key])


def test_state_of_another_optimizer_is_refused() -> None:
    params = parameters()
    updater = table("optimizer").build("adamw").build(params)
    with pytest.raises(CheckpointError, match="saved with another optimizer"):
        updater.load({})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "adamw", "lr": 0}, r"optimizer\.adamw\.lr = 0"),
        ({"name": "adamw", "beta1": 1}, "beta1 = 1"),
        ({"name": "muon", "iterations": 0}, "iterations = 0: expected 1 to 20"),
        ({"name": "muon", "learning_rate": 1}, "no such key"),
        ({"name": "adamw", "lr": "fast"}, r"optimizer\.adamw\.lr = 'fast'"),
    ],
)
def test_bad_options(choice: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table("optimizer").build(choice)


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_an_update_in_groups_is_the_same_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_state, "_PART_BYTES", 100)
    plain, grouped = parameters(), parameters()
    one = table("optimizer").build(name).build(plain)
    other = table("optimizer").build(name).build(grouped)
    for step in range(3):
        gradients(plain, step)
        gradients(grouped, step)
        before = {key: value.detach().clone() for key, value in grouped.items()}
        notes: list[str] = []

        def ready(names: Collection[str], before: dict[str, torch.Tensor] = before) -> None:
            assert all(torch.equal(grouped[n], before[n]) for n in names)
            notes.extend(names)  # noqa: B023

        one.step(0.5)
        other.step(0.5, ready)  # type: ignore[call-arg]
        assert sorted(notes) == sorted(grouped)
    for key, entries in one.state().items():
        assert torch.equal(plain[key], grouped[key])
        for entry, value in entries.items():
            assert torch.equal(value, other.state()[key][entry])


@pytest.mark.parametrize("fused", [False, True])
def test_the_eager_adamw_is_pytorchs(fused: bool) -> None:
    """The same bits, the same state, and a state that one takes from the other."""
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": fused}
    mine, theirs = parameters(), parameters()
    eager = EagerAdamW(mine.values(), **options)
    plain = torch.optim.AdamW(theirs.values(), **options)
    for step in range(4):
        if step == 2:  # goes on from what the other has saved
            eager.load_state_dict(copy.deepcopy(plain.state_dict()))
        for params, optimizer in ((mine, eager), (theirs, plain)):
            gradients(params, step)
            optimizer.step()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert str(eager.state_dict()) == str(plain.state_dict())
    eager.zero_grad()
    assert all(parameter.grad is None for parameter in mine.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_no_update_of_a_new_model_imports_the_compiler(name: str) -> None:
    """Importing it would double the time that a rank needs before its first step."""
    code = (
        "import sys\n"
        "from shoal.core.parts import table\n"
        "from shoal.model.config import ModelConfig\n"
        "from shoal.model.initialise import empty, init_weights\n"
        "model = empty(ModelConfig(vocab_size=32, hidden=16, num_layers=1, num_heads=2,\n"
        "    num_kv_heads=2, head_dim=8, ffn_hidden=16, max_position=8, family='llama'))\n"
        "init_weights(model, 0)\n"
        "named = dict(model.named_parameters())\n"
        "for one in named.values():\n    one.grad = one.detach().clone()\n"
        f"table('optimizer').build({name!r}).build(named).step(1.0)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
