"""Quantizers: what each promises of one matrix, and a whole model taken through them."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import KernelError, ModelError  # noqa: E402
from shoal.kernel.formats import weight_format  # noqa: E402
from shoal.model import QUANTIZERS, huggingface  # noqa: E402
from shoal.model.lowbit import LowBitLinear  # noqa: E402
from shoal.model.quantize.blocks import quantize  # noqa: E402
from shoal.model.quantize.inputs import Inputs  # noqa: E402

from .conftest import CONFIGS  # noqa: E402


def correlated(k: int, rows: int = 512, seed: int = 0) -> torch.Tensor:
    """Inputs as layers have them: few directions, and some channels far larger than others."""
    source = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, k // 4, generator=source) @ torch.randn(k // 4, k, generator=source)
    sizes = torch.exp(torch.randn(k, generator=source))
    return (mixed + 0.3 * torch.randn(rows, k, generator=source)) * sizes


def watched(x: torch.Tensor) -> Inputs:
    inputs = Inputs(x.shape[-1])
    inputs.add(x)
    return inputs


def lost(text: str, name: str, weight: torch.Tensor, x: torch.Tensor, **options: object) -> float:
    """Mean square error of the layer's outputs."""
    fmt = weight_format(text)
    part = QUANTIZERS.build({"name": name, **options})
    packed = part.quantize(weight, fmt, watched(x) if part.calibrated else None)
    return float((x @ (fmt.dequantize(packed) - weight).T).square().mean())


FORMATS = ["int4-g32", "int3-channel", "uint3-g16", "float4_e2m1-g32", "bipolar3-g32", "bfp4-g32"]


@pytest.mark.parametrize("text", [*FORMATS, "int4-g32-2:4"])
@pytest.mark.parametrize("search", [False, True])
def test_gptq_with_uncorrelated_inputs_is_rounding(text, search):
    """With H in proportion to I there is nothing to feed forward."""
    weight = torch.randn(6, 160, generator=torch.Generator().manual_seed(1))
    inputs = Inputs(160)
    inputs.add(torch.eye(160) * 2)
    fmt = weight_format(text)
    gptq = QUANTIZERS.build({"name": "gptq", "clip_search": search})
    rtn = QUANTIZERS.build({"name": "rtn", "clip_search": search})
    ours, plain = gptq.quantize(weight, fmt, inputs), rtn.quantize(weight, fmt)
    for name, tensor in plain.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


@pytest.mark.parametrize("text", [*FORMATS, "int4-g32-2:4", "int4-g192"])
def test_gptq_keeps_outputs_better_than_rounding(text):
    weight = torch.randn(32, 192, generator=torch.Generator().manual_seed(2))
    x = correlated(192)
    plain = lost(text, "rtn", weight, x)
    assert lost(text, "gptq", weight, x) < 0.8 * plain
    if "2:4" not in text:
        assert lost(text, "gptq", weight, x, act_order=True) < 0.8 * plain


@pytest.mark.parametrize("text", FORMATS)
def test_searched_clips_are_no_worse(text):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) ** 3
    fmt = weight_format(text)
    losses = []
    for search in (False, True):
        packed = QUANTIZERS.build({"name": "rtn", "clip_search": search}).quantize(weight, fmt)
        losses.append(float((fmt.dequantize(packed) - weight).square().sum()))
    assert losses[1] <= losses[0] * (1 + 1e-6)


def test_awq_rescales_large_inputs():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    x = correlated(64)
    fmt, awq = weight_format("int3-g32"), QUANTIZERS.build("awq")
    inputs = watched(x)
    factor = awq.rescale(weight, fmt, inputs)
    assert factor.shape == (64,)
    rtn = QUANTIZERS.build("rtn")
    scaled = fmt.dequantize(rtn.quantize(weight * factor, fmt)) / factor
    plain = fmt.dequantize(rtn.quantize(weight, fmt))
    assert (x @ (scaled - weight).T).square().mean() < (x @ (plain - weight).T).square().mean()
    # Inputs that are all alike leave nothing to gain.
    same = Inputs(64)
    same.add(torch.eye(64))
    assert awq.rescale(weight, fmt, same) is None


def test_quantizers_refuse():
    weight = torch.randn(4, 32)
    for name in ("gptq", "awq"):
        with pytest.raises(ModelError, match="give calibration text"):
            QUANTIZERS.build(name).quantize(weight, weight_format("int4-g32"))
    inputs = watched(torch.randn(8, 32))
    with pytest.raises(ModelError, match="leave act_order out"):
        QUANTIZERS.build({"name": "gptq", "act_order": True}).quantize(
            weight, weight_format("int4-g32-2:4"), inputs
        )
    inputs.gram_KK[3, 3] = torch.nan
    with pytest.raises(ModelError, match="no Cholesky factor"):
        QUANTIZERS.build("gptq").quantize(weight, weight_format("int4-g32"), inputs)


def test_gptq_of_unseen_inputs_is_rounding():
    weight = torch.randn(4, 32)
    fmt = weight_format("int4-g32")
    packed = QUANTIZERS.build("gptq").quantize(weight, fmt, Inputs(32))
    plain = QUANTIZERS.build({"name": "rtn", "clip_search": True}).quantize(weight, fmt)
    assert torch.equal(packed.tensors["codes"], plain.tensors["codes"])


@pytest.mark.parametrize("name", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "mixtral"])
def test_a_model_is_quantized_stored_and_read_back(name, family, make, tmp_path):
    config = CONFIGS[family]
    original, changed = make(config), make(config)
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(5))
    part, fmt = QUANTIZERS.build(name), weight_format("int4-g16")
    made = quantize(changed, fmt, part, tokens if part.calibrated else None)
    matrices = {
        n for n, p in original.named_parameters() if n.startswith("blocks.") and p.dim() > 1
    }
    assert set(made.packed) == {n for n in matrices if "router" not in n}
    with torch.no_grad():
        exact, few = original(tokens), made.model(tokens)
    apart = (few - exact).norm() / exact.norm()
    assert 0 < apart < 0.5
    state = {n: p.detach() for n, p in made.model.named_parameters()}
    huggingface.write_state(
        tmp_path / "m", config, state, packed=made.packed, method=name, shard_bytes=20_000
    )
    said = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "shoal", "format": "int4-g16", "method": name}
    plain = huggingface.read(tmp_path / "m", packed=False)
    for (n, a), (other, b) in zip(
        made.model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert n == other
        assert torch.equal(a, b)
    packed = huggingface.read(tmp_path / "m")
    layers = [m for m in packed.modules() if isinstance(m, LowBitLinear)]
    assert layers
    assert all(layer.format == "int4-g16" for layer in layers)
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens), few, rtol=2e-2, atol=2e-2 * few.std().item())
    huggingface.write(tmp_path / "again", packed)
    for a, b in zip(
        plain.parameters(),
        huggingface.read(tmp_path / "again", packed=False).parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("text", ["int4-g16-2:4", "uint3-g16", "float3_e1m1-g16", "bfp8-g16"])
def test_every_kind_of_format_is_stored(text, make, tmp_path):
    config = CONFIGS["llama"]
    model = make(config)
    made = quantize(model, weight_format(text), QUANTIZERS.build("rtn"))
    state = {n: p.detach() for n, p in model.named_parameters()}
    huggingface.write_state(tmp_path / "m", config, state, packed=made.packed)
    again = huggingface.read(tmp_path / "m", packed=False)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rescaling_alone_changes_nothing(make):
    """What goes into a matrix comes out of what makes its inputs."""

    class Doubling:
        calibrated = True

        def rescale(self, weight_NK, fmt, inputs):
            return torch.full((weight_NK.shape[1],), 2.0)

        def quantize(self, weight_NK, fmt, inputs=None):
            return fmt.quantize(weight_NK)

    for family in ("llama", "llama-bias", "mixtral"):
        config = CONFIGS[family].model_copy(update={"num_kv_heads": 4})
        plain, changed = make(config), make(config)
        tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(9))
        # Each weight has an exponent of its own, so factors of two are rounded away by nothing.
        fmt = weight_format("bfp8-g1")
        quantize(plain, fmt, QUANTIZERS.build("rtn"))
        quantize(changed, fmt, Doubling(), tokens)
        factors = {
            name: float((b / a).detach().nanmean())
            for (name, a), b in zip(plain.named_parameters(), changed.parameters(), strict=True)
            if name.startswith("blocks.0.") and name.endswith("norm.weight")
        }
        assert factors["blocks.0.attention_norm.weight"] == 0.5
        assert factors["blocks.0.mlp_norm.weight"] == (1 if family == "mixtral" else 0.5)
        with torch.no_grad():
            torch.testing.assert_close(changed(tokens), plain(tokens))


def test_directories_that_do_not_fit(make, tmp_path):
    config = CONFIGS["llama"]
    model = make(config)
    with pytest.raises(ModelError, match="give calibration text"):
        quantize(model, weight_format("int4-g16"), QUANTIZERS.build("gptq"))
    made = quantize(model, weight_format("int4-g16"), QUANTIZERS.build("rtn"))
    state = {n: p.detach() for n, p in model.named_parameters()}
    huggingface.write_state(tmp_path / "m", config, state, packed=made.packed)
    file = tmp_path / "m/config.json"
    raw = json.loads(file.read_text())

    def said(**changes: object) -> None:
        entry = {**raw["quantization_config"], **changes}
        file.write_text(json.dumps({**raw, "quantization_config": entry}))

    said(quant_method="gpqt")
    with pytest.raises(ModelError, match=r"quant_method = 'gpqt': .*did you mean 'gptq'"):
        huggingface.read(tmp_path / "m")
    said(format="int5-g16")
    with pytest.raises(ModelError, match=r"q_proj.codes has the shape \[64, 32\]"):
        huggingface.read(tmp_path / "m")
    said(format="int4-g24")
    with pytest.raises(ModelError, match="multiple of 24; nearest 48 and 72"):
        huggingface.read(tmp_path / "m")
    said(format="int4")
    with pytest.raises(ModelError, match=r"q_proj.scales has the shape \[64, 4\]"):
        huggingface.read(tmp_path / "m")
    with pytest.raises(KernelError, match="multiple of 128"):
        quantize(make(config), weight_format("int4-g128"), QUANTIZERS.build("rtn"))


def test_a_model_is_packed_in_place(make):
    from shoal.model.quantize.layers import pack, packed_of

    for family in ("qwen2", "mixtral"):
        config = CONFIGS[family]
        model = pack(make(config), "int8-g32")
        original = dict(make(config).named_parameters())
        packed = packed_of(model)
        assert len(packed) == 4 * config.num_layers
        for name, matrix in packed.items():
            weight = original[name].detach().flatten(0, -2)
            assert (weight_format("int8-g32").dequantize(matrix) - weight).abs().max() < 0.01
        assert not any(name in dict(model.named_parameters()) for name in packed)
        assert packed_of(pack(model, "int4-g32")).keys() == packed.keys()
    with pytest.raises(KernelError, match=r"blocks\.0\.attention\.qkv_proj\.weight: "):
        pack(make(CONFIGS["qwen2"]), "int4-g128")
