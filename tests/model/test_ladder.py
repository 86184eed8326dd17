"""Ladder residual: the recurrence, its cache, its directory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.checkpoint.convert import convert  # noqa: E402
from shoal.core.errors import ModelError  # noqa: E402
from shoal.cost.shapes import resolve  # noqa: E402
from shoal.ir import Architecture, TrainJob  # noqa: E402
from shoal.kernel.formats import weight_format  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.architecture import rebuilt  # noqa: E402
from shoal.model.attention import KVCache  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.quantize.blocks import quantize  # noqa: E402
from shoal.model.quantize.rtn import RoundToNearest  # noqa: E402
from shoal.model.rope import tables  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.train.build import weights_of  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

LAYERS = 4


def config(layers: Any = "all", name: str = "ladder") -> ModelConfig:
    return ModelConfig(
        vocab_size=53,
        hidden=24,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden=32,
        max_position=64,
        initializer_range=0.3,
        architecture={"residual": {"name": name, "layers": layers}},
    )


def model(layers: Any = "all", name: str = "ladder") -> Transformer:
    return random(config(layers, name)).double().eval()


def ids(length: int = 9) -> torch.Tensor:
    return torch.randint(0, 53, (2, length), generator=torch.Generator().manual_seed(0))


def recurrence(ladder: Transformer, tokens: torch.Tensor, late: list[bool]) -> torch.Tensor:
    """x_i = x_(i-1) + y_(i-2), written down with all outputs at hand."""
    cos, sin = tables(ladder.config, 0, tokens.shape[1], torch.device("cpu"), torch.float64)
    outputs: list[torch.Tensor] = []
    embedded = ladder.embed(tokens)
    for layer, block in enumerate(ladder.blocks):
        for norm, branch in (
            (block.attention_norm, lambda x, b=block: b.attention(x, cos, sin)),
            (block.mlp_norm, block.mlp),
        ):
            seen = outputs[:-1] if late[layer] else outputs
            outputs.append(branch(norm(sum(seen, embedded))))
    return ladder.logits(ladder.norm(sum(outputs, embedded)))


@pytest.mark.parametrize(
    ("layers", "late"),
    [
        ("all", [True] * 4),
        ("upper_half", [False, False, True, True]),
        ((0, 2), [True, False, True, False]),
    ],
)
def test_the_recurrence_and_its_cache(layers: Any, late: list[bool]) -> None:
    ladder = model(layers)
    with torch.no_grad():
        want = recurrence(ladder, ids(), late)
        assert torch.allclose(ladder(ids()), want, atol=1e-12)
        cache = KVCache(ladder.config, 2, 16, dtype=torch.float64)
        parts = [ladder(ids()[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert torch.allclose(torch.cat(parts, 1), want, atol=1e-12)
    assert not torch.allclose(model(name="standard")(ids()), want)


def test_without_outputs_it_is_the_standard_model() -> None:
    ladder, standard = model(), model(name="standard")
    for made in (ladder, standard):
        for block in made.blocks:
            block.attention.o_proj.weight.data.zero_()
            block.mlp.down_proj.weight.data.zero_()
    assert torch.equal(ladder(ids()), standard(ids()))


def test_gradients_do_not_depend_on_what_is_computed_again() -> None:
    results = []
    for recompute in (False, True):
        ladder = model("upper_half")
        ladder(ids(), recompute=recompute).square().sum().backward()
        results.append([p.grad for p in ladder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_its_directory_says_that_it_is_no_llama(tmp_path: Path) -> None:
    made = model("upper_half").float()
    huggingface.write(tmp_path / "ladder", made)
    again = huggingface.read(tmp_path / "ladder")
    assert again.config.architecture == made.config.architecture
    assert torch.equal(again(ids()), made(ids()))
    text = (tmp_path / "ladder" / "config.json").read_text()
    assert '"shoal_ladder"' in text and "LlamaForCausalLM" not in text
    assert resolve(str(tmp_path / "ladder")).architecture == made.config.architecture
    (tmp_path / "ladder" / "config.json").write_text(text.replace("shoal_ladder", "shoal_duo"))
    with pytest.raises(ModelError, match="model_type"):
        huggingface.read(tmp_path / "ladder")


def test_a_plain_model_becomes_a_ladder_with_a_warning_or_a_flag(tmp_path: Path) -> None:
    plain = random(config(name="standard"))
    with pytest.warns(UserWarning, match=r"residual\.rewire"):
        made = rebuilt(plain, Architecture(residual="ladder"))
    assert torch.equal(made(ids()), model().float()(ids()))
    huggingface.write(tmp_path / "plain", plain)
    flagged = {"residual": {"name": "ladder", "rewire": True}}
    job = TrainJob(model=str(tmp_path / "plain"), architecture=flagged)
    assert torch.equal(weights_of(job).model()(ids()), made(ids()))
    out = convert(tmp_path / "plain", tmp_path / "out", architecture=Architecture(**flagged))
    again = huggingface.read_config(Path(out))
    assert again.architecture.residual.name == "ladder" and not again.architecture.residual.rewire
    with pytest.raises(ModelError, match="begin with a plain model"):
        rebuilt(made, Architecture())


@pytest.mark.parametrize("layers", [(), (4,), (-1,)])
def test_blocks_that_the_model_has_not(layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"residual\.layers"):
        config(layers)


def test_what_does_not_know_it_refuses_it() -> None:
    with pytest.raises(ModelError, match="quantize"):
        quantize(model(), weight_format("int4-g8"), RoundToNearest())
    with pytest.raises(ModelError, match="parallel"):
        ModelConfig(**{**dict(config()), "family": "parallel"})
