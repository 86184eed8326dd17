"""Directories as AutoGPTQ, GPTQModel and AutoAWQ write them, made here from their definitions."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from shoal.core.errors import ModelError  # noqa: E402
from shoal.kernel.formats import weight_format  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.lowbit import LowBitLinear  # noqa: E402
from shoal.model.quantize.layers import packed_of  # noqa: E402

from .conftest import CONFIGS  # noqa: E402


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., C] as int32 words along the last dimension, lowest bits first."""
    out = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        raw = number.to_bytes(codes.shape[-1] * bits // 8, "little")
        out.append(torch.frombuffer(bytearray(raw), dtype=torch.int32))
    return torch.stack(out).view(*codes.shape[:-1], -1)


def gptq(codes_NK, zeros_NG, scales_NG, place_K, bits, less=1):
    stored = (zeros_NG.long() - less) & (2**bits - 1)
    return {
        "qweight": words(codes_NK, bits).T.contiguous(),
        "qzeros": words(stored.T, bits),
        "scales": scales_NG.T.contiguous(),
        "g_idx": place_K.int(),
    }


def awq(codes_NK, zeros_NG, scales_NG):
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(rows_RN):
        return words(rows_RN.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    return {
        "qweight": mixed(codes_NK.T.contiguous()),
        "qzeros": mixed(zeros_NG.T.contiguous()),
        "scales": scales_NG.T.contiguous(),
    }


def directory(make, tmp_path, store, settings, *, bits=4, group=16, symmetric=True, order=False):
    """A quantized directory and the weights that it means, by Hugging Face names."""
    config = CONFIGS["llama"]
    place = tmp_path / "m"
    huggingface.write(place, make(config))
    tensors = load_file(place / "model.safetensors")
    source = torch.Generator().manual_seed(7)
    meant = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        n, k = tensors.pop(name).shape
        groups = k // group
        codes = torch.randint(0, 2**bits, (n, k), generator=source)
        zeros = torch.full((n, groups), 2 ** (bits - 1))
        if not symmetric:
            zeros = torch.randint(0, 2**bits, (n, groups), generator=source)
        scales = (torch.rand(n, groups, generator=source) / 50).half()
        place_K = torch.arange(k) // group
        if order:
            place_K = place_K[torch.randperm(k, generator=source)]
        meant[name] = (codes - zeros[:, place_K]).float() * scales[:, place_K].float()
        base = name.removesuffix(".weight")
        args = (place_K, bits) if store is gptq else ()
        for leaf, tensor in store(codes, zeros, scales, *args).items():
            tensors[f"{base}.{leaf}"] = tensor
    save_file(tensors, place / "model.safetensors")
    raw = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    return place, meant


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def same(place, meant, expected):
    plain = huggingface.read(place, packed=False)
    state = dict(plain.named_parameters())
    for layer in range(2):
        theirs = f"model.layers.{layer}"
        qkv = torch.cat([meant[f"{theirs}.self_attn.{x}_proj.weight"] for x in "qkv"])
        assert torch.equal(state[f"blocks.{layer}.attention.qkv_proj.weight"], qkv)
        down = meant[f"{theirs}.mlp.down_proj.weight"]
        assert torch.equal(state[f"blocks.{layer}.mlp.down_proj.weight"], down)
    packed = huggingface.read(place)
    layers = [m for m in packed.modules() if isinstance(m, LowBitLinear)]
    assert {layer.format for layer in layers} == ({expected} if expected else set())
    for name, matrix in packed_of(packed).items():
        assert torch.equal(weight_format(matrix.format).dequantize(matrix), state[name])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_directories(bits, symmetric, make, tmp_path):
    place, meant = directory(
        make, tmp_path, gptq, {**GPTQ, "bits": bits}, bits=bits, symmetric=symmetric
    )
    same(place, meant, f"{'int' if symmetric else 'uint'}{bits}-g16")


def second(codes, zeros, scales, bits=3, group=32):
    return gptq(codes, zeros, scales, torch.arange(codes.shape[1]) // group, bits, less=0)


def test_gptq_that_says_version_1_and_is_version_2(make, tmp_path):
    def store(codes, zeros, scales):
        return second(codes, zeros, scales, bits=4, group=16)

    place, meant = directory(make, tmp_path, store, GPTQ)
    same(place, meant, "int4-g16")


def test_gptq_of_3_bits_and_version_2(make, tmp_path):
    place, meant = directory(
        make,
        tmp_path,
        second,
        {**GPTQ, "bits": 3, "group_size": 32, "checkpoint_format": "gptq_v2"},
        bits=3,
        group=32,
        symmetric=False,
    )
    same(place, meant, "uint3-g32")


def test_gptq_with_inputs_in_any_order_becomes_plain(make, tmp_path):
    place, meant = directory(make, tmp_path, gptq, {**GPTQ, "desc_act": True}, order=True)
    same(place, meant, None)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_directories(symmetric, make, tmp_path):
    place, meant = directory(make, tmp_path, awq, AWQ, symmetric=symmetric)
    same(place, meant, f"{'int' if symmetric else 'uint'}4-g16")


def test_a_bias_that_the_model_lacks_must_be_zero(make, tmp_path):
    place, meant = directory(make, tmp_path, gptq, GPTQ)
    tensors = load_file(place / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(64)
    save_file(tensors, place / "model.safetensors")
    same(place, meant, "int4-g16")
    tensors["model.layers.0.mlp.down_proj.bias"][3] = 1
    save_file(tensors, place / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj.bias is not 0"):
        huggingface.read(place)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**GPTQ, "bits": 5}, r"bits = 5: expected 2 or 3 or 4 or 8"),
        ({**GPTQ, "group_size": 0}, "group_size = 0"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "expected gptq or gptq_v2"),
        ({**GPTQ, "dynamic": {"-:x": {}}}, "dynamic"),
        ({**AWQ, "version": "gemv"}, "expected gemm"),
        ({"quant_method": "bitsandbytes"}, "expected one of shoal, gptq, awq"),
        ("gptq", "quant_method = None"),
        ({**GPTQ, "group_size": 32}, "qzeros has the shape"),
    ],
)
def test_what_is_not_read(settings, said, make, tmp_path):
    place, _ = directory(make, tmp_path, gptq, settings)
    with pytest.raises(ModelError, match=said):
        huggingface.read(place)


def test_damaged_tensors(make, tmp_path):
    place, _ = directory(make, tmp_path, gptq, GPTQ)
    file = place / "model.safetensors"
    tensors = load_file(file)
    base = "model.layers.0.self_attn.q_proj"

    def changed(**changes):
        save_file({**tensors, **{f"{base}.{k}": v for k, v in changes.items()}}, file)
        with pytest.raises(ModelError) as caught:
            huggingface.read(place)
        return str(caught.value)

    assert "g_idx: expected groups from 0 to 3" in changed(
        g_idx=torch.full((64,), 9, dtype=torch.int32)
    )
    assert "scales" in changed(scales=torch.full((4, 64), torch.inf, dtype=torch.float16))
    assert "qweight is of dtype F32" in changed(qweight=torch.zeros(8, 64))
    less = {name: t for name, t in tensors.items() if name != f"{base}.scales"}
    save_file(less, file)
    with pytest.raises(ModelError, match=r"q_proj.scales is missing"):
        huggingface.read(place)
