"""Traced models on ranks: the same function, the same gradients, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ModelError, PlanError
from shoal.parallel.autotp.auto import ExecutablePlan, discover, split_model
from shoal.parallel.autotp.families import FAMILIES, example, from_config, read_config
from shoal.parallel.autotp.shapes import AutoSplit
from shoal.parallel.autotp.split import SplitModel, part_of, whole_of
from shoal.parallel.tensor.operators import TAG


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Block(nn.Module):
    """Attention with a fused projection under a name that says nothing, and a gated pair."""

    def __init__(self, width: int = 16, heads: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.alpha = nn.LayerNorm(width)
        self.beta = nn.Linear(width, 3 * width)
        self.gamma = nn.Linear(width, width)
        self.delta = nn.Linear(width, 2 * width)
        self.epsilon = nn.Linear(width, 2 * width, bias=False)
        self.zeta = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        three = self.beta(self.alpha(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = three.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gamma(y.transpose(1, 2).reshape(b, t, d))
        return x + self.zeta(self.drop(self.delta(x).sigmoid() * self.epsilon(x)))


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one = nn.Embedding(40, 16)
        self.two = Block(**options)
        self.three = nn.Linear(16, 40, bias=False)
        self.three.weight = self.one.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.three(self.two(self.one(ids)))


class Fickle(Model):
    """Control flow that depends on values."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.one(ids)
        if float(x.sum()) > -1e9:
            x = self.two(x)
        return nn.functional.linear(x, self.three.weight)


def ids(columns: int = 5) -> Tensor:
    return torch.randint(0, 40, (2, columns), generator=torch.Generator().manual_seed(1))


def made(cls: type[nn.Module] = Model, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(**options).double()


def full_state(planned: ExecutablePlan, split: nn.Module, comm: Any) -> dict[str, Tensor]:
    """Whole parameters by their names in the model, on every rank."""
    out: dict[str, Tensor] = {}
    inside: set[str] = set()
    for part in planned.parts:
        module = split.get_submodule(part.path) if part.path else split
        assert isinstance(module, SplitModel)
        for value, target in part.traced.params.items():
            x = module.parameter_of(target).detach()
            place = part.flow.params.get(value)
            if place is not None:
                every = x.new_empty(comm.world * x.shape[0], *x.shape[1:])
                comm.all_gather(every, x.contiguous(), tag=TAG).wait()
                x = whole_of(list(every.chunk(comm.world)), *place)
            out[f"{part.path}.{target}".lstrip(".")] = x
        inside |= {name for name, _ in module.named_parameters(prefix=part.path)}
    out |= {n: p.detach() for n, p in split.named_parameters() if n not in inside}
    return out


def same(model: nn.Module, tp: int) -> None:
    planned = discover(model, (ids(),), tp=tp)
    whole = model(ids())
    weight = torch.randn(whole.shape, dtype=torch.float64)
    (whole * weight).sum().backward()

    def on(comm: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        split = split_model(planned, model, comm)
        out = split(ids())
        (out * weight).sum().backward()
        state = full_state(planned, split, comm)
        for parameter in split.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else parameter * 0
        return out.detach(), state, full_state(planned, split, comm)

    own = dict(model.named_parameters())
    for out, state, grads in run_ranks(tp, on):
        torch.testing.assert_close(out, whole.detach(), rtol=1e-10, atol=1e-12)
        assert set(grads) == set(state) == set(own)
        for name, parameter in own.items():
            torch.testing.assert_close(state[name], parameter.detach())
            assert parameter.grad is not None
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tp", [2, 4])
def test_equals_one_process(tp: int) -> None:
    same(made(), tp)


class Twice(nn.Module):
    """A residual chain of four products, of which the first and the last may be one."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.one = nn.Embedding(40, 16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.gate, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.last = last
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.one(ids)
        x = x + self.down(self.up(x).tanh())
        x = x + self.out(self.gate(x).tanh())
        return self.head(x + getattr(self, self.last)(x))


@pytest.mark.parametrize("last", ["up", "down"])
def test_one_product_twice_in_a_residual_chain(last: str) -> None:
    """What is needed whole by one of its uses stays whole, with its pair; the rest is split."""
    model = made(Twice, last=last)
    plan = discover(model, (ids(),), tp=2).plan
    assert {n for n in plan.weights if "weight" in n} == {
        "one.weight", "gate.weight", "out.weight", "head.weight"
    }  # fmt: skip
    assert "which needs it whole" in plan.whole[f"{last}.weight"]
    same(model, 2)


def test_fused_heads_are_found_without_names() -> None:
    plan = discover(made(), (ids(),), tp=2).plan
    assert plan.weights["two.beta.weight"].segments == (16, 16, 16)
    assert {n: s.style for n, s in plan.weights.items() if n.endswith("weight")} == {
        "one.weight": "vocabulary",
        "two.beta.weight": "column",
        "two.gamma.weight": "row",
        "two.delta.weight": "column",
        "two.epsilon.weight": "column",
        "two.zeta.weight": "row",
    }
    assert plan.sharded > 0.9
    assert plan.dtensor()["two.beta"] == "packed_colwise"
    assert plan.dtensor()["three"] == "colwise_gather_output"


def test_what_cannot_be_traced_is_planned_module_by_module() -> None:
    model = made(Fickle)
    with pytest.raises(PlanError, match="cannot be traced as a whole"):
        discover(model, (ids(),), tp=2, fallback="refuse")
    planned = discover(model, (ids(),), tp=2)
    assert [part.path for part in planned.parts] == ["two"]
    first, *rest = planned.plan.notes
    assert "cannot be traced as a whole" in first
    assert any("one stays whole: it shares weights" in note for note in rest)
    assert "two.beta.weight" in planned.plan.weights
    same(model, 2)


def test_other_shapes_share_parameters() -> None:
    model = made()

    def on(comm: Any) -> tuple[int, Tensor]:
        split = AutoSplit(model, (ids(),), {}, comm)
        split(ids())
        return len(list(split.parameters())), split(ids(7)).detach()

    count = len(list(discover(model, (ids(),), tp=2).parts[0].traced.params))
    for parameters, out in run_ranks(2, on):
        assert parameters == count
        torch.testing.assert_close(out, model(ids(7)).detach())


def test_parts_make_a_whole() -> None:
    x = torch.arange(24.0).view(2, 12)
    parts = [part_of(x, 1, (4, 8), rank, 2) for rank in range(2)]
    assert parts[0].tolist()[0] == [0, 1, 4, 5, 6, 7]
    assert whole_of(parts, 1, (4, 8)).equal(x)


def test_refuses_with_a_reason() -> None:
    with pytest.raises(PlanError, match=r"two.*3 heads, which 2 ranks cannot share"):
        discover(_three_heads(), (ids(),), tp=2)
    planned = discover(made(), (ids(),), tp=2)
    with pytest.raises(PlanError, match=r"the traced shapes \[\(2, 5\)\]"):
        run_ranks(2, lambda comm: split_model(planned, made(), comm)(ids(6)))
    with pytest.raises(PlanError, match="2, as planned"):
        run_ranks(4, lambda comm: split_model(planned, made(), comm))
    dropped = discover(made(drop=0.5).train(), (ids(),), tp=2)
    with pytest.raises(PlanError, match=r"dropout of two.drop = 0.5"):
        run_ranks(2, lambda comm: split_model(dropped, made(), comm))


def _three_heads() -> nn.Module:
    model = made()
    model.two = Block(width=24, heads=3).double()
    model.one = nn.Embedding(40, 24).double()
    model.three = nn.Linear(24, 40, bias=False).double()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_families_on_meta(family: str) -> None:
    pytest.importorskip("transformers")
    model = from_config({"model_type": family, **FAMILIES[family]})
    assert next(model.parameters()).is_meta
    plan = discover(model, (), example(model), tp=2).plan
    assert plan.sharded >= 0.9
    assert plan.all_reduces == 5


def test_configurations_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    with pytest.raises(ModelError, match="no configuration can be read"):
        read_config(tmp_path)
    file.write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ModelError, match="the key model_type"):
        read_config(file)
    with pytest.raises(ModelError, match="model_type = 'nonesuch'"):
        from_config({"model_type": "nonesuch"})
