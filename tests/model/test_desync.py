"""Desynchronised residual: the recurrence, its cache, its directory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ModelError  # noqa: E402
from shoal.ir import Architecture  # noqa: E402
from shoal.ir.architecture import Residual  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.architecture import rebuilt  # noqa: E402
from shoal.model.attention import KVCache, attend  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.rope import tables  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.parallel.tensor.block import local_config  # noqa: E402
from shoal.parallel.tensor.slices import slices, take  # noqa: E402
from shoal.train.zoo import random  # noqa: E402


def config(residual: Any, **changes: Any) -> ModelConfig:
    given = {
        "vocab_size": 53,
        "hidden": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 32,
        "max_position": 64,
        "initializer_range": 0.3,
        "architecture": {"residual": residual},
    }
    return ModelConfig(**{**given, **changes})


def model(residual: Any, **changes: Any) -> Transformer:
    return random(config(residual, **changes)).double().eval()


def ids(length: int = 9) -> torch.Tensor:
    return torch.randint(0, 53, (2, length), generator=torch.Generator().manual_seed(0))


def apart(every: int, ranks: int = 2) -> dict[str, Any]:
    return {"name": "desync", "every": every, "ranks": ranks}


def recurrence(made: Transformer, tokens: torch.Tensor, every: int) -> torch.Tensor:
    """Two ranks with parts of the weights of their own, written down."""
    from shoal.ir import Parallel

    whole = dict(made.named_parameters())
    parts = []
    for rank in range(2):
        local = Transformer(local_config(made.config, 2)).double()
        for name, part in slices(made.config, Parallel(tp=2), rank).items():
            if name.startswith("blocks."):
                owner, _, leaf = name.rpartition(".")
                value = torch.nn.Parameter(take(whole[name], part))
                setattr(local.get_submodule(owner), leaf, value)
        parts.append(local)
    cos, sin = tables(made.config, 0, tokens.shape[1], torch.device("cpu"), torch.float64)
    x = [made.embed(tokens)] * 2
    last = 2 * len(made.blocks)
    for number in range(1, last + 1):
        outputs = []
        for rank, local in enumerate(parts):
            block = local.blocks[(number - 1) // 2]
            if number % 2:
                seen = block.attention_norm(x[rank])
                q, k, v = block.attention.rotated(block.attention.qkv_proj(seen), cos, sin)
                q, k, v = (one.transpose(1, 2) for one in (q, k, v))
                mixed = attend(q, k, v, None, causal=True).transpose(1, 2).flatten(2)
                outputs.append(block.attention.o_proj(mixed))
            else:
                outputs.append(block.mlp(block.mlp_norm(x[rank])))
        x = [one + output for one, output in zip(x, outputs, strict=True)]
        if number % every == 0 or number == last:
            before = [one - output for one, output in zip(x, outputs, strict=True)]
            x = [sum(before) / 2 + sum(outputs)] * 2
    return made.logits(made.norm(x[0]))


@pytest.mark.parametrize("every", [2, 4, 6])
def test_the_recurrence_and_its_cache(every: int) -> None:
    made = model(apart(every))
    with torch.no_grad():
        want = recurrence(made, ids(), every)
        assert torch.allclose(made(ids()), want, atol=1e-12)
        cache = KVCache(made.config, 2, 16, dtype=torch.float64)
        parts = [made(ids()[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert torch.allclose(torch.cat(parts, 1), want, atol=1e-12)
    assert not torch.allclose(model("standard")(ids()), want)


def test_with_every_sum_it_is_the_standard_model() -> None:
    with torch.no_grad():
        assert torch.allclose(model(apart(1))(ids()), model("standard")(ids()), atol=1e-12)


def test_tokens_side_by_side_are_tokens_in_a_row() -> None:
    made = model(apart(4))

    def mixer(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sides = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
        return attend(*sides, None, causal=True)[0].transpose(0, 1)

    rows = torch.tensor([3, 8])
    with torch.no_grad():
        got = made.flat(ids()[0], torch.arange(9), mixer, rows)
        assert torch.allclose(got, made.hidden(ids()[:1])[0, rows], atol=1e-12)


def test_gradients_do_not_depend_on_what_is_computed_again() -> None:
    results = []
    for recompute in (False, True):
        made = model(apart(4))
        made(ids(), recompute=recompute).square().sum().backward()
        results.append([p.grad for p in made.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_its_directory_says_that_it_is_no_llama(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"residual\.rewire"):
        made = rebuilt(random(config("standard")), Architecture(residual=apart(4)))
    huggingface.write(tmp_path / "model", made)
    again = huggingface.read(tmp_path / "model")
    assert again.config.architecture.residual == Residual(name="desync", every=4)
    assert torch.equal(again(ids()), made(ids()))
    assert '"shoal_desync"' in (tmp_path / "model" / "config.json").read_text()


@pytest.mark.parametrize(
    ("residual", "changes", "named"),
    [
        (apart(7), {}, r"residual\.every.*at most 6"),
        (apart(2, 3), {}, r"residual\.ranks"),
        ({"name": "ladder", "every": 3}, {}, r"residual\.every"),
        ({"name": "desync", "layers": "upper_half"}, {}, r"residual\.layers"),
        (apart(2), {"output_bias": True}, "biases"),
    ],
)
def test_what_cannot_be_is_refused(residual: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        config(residual, **changes)
