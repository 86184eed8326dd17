"""GGUF files: block types against their definitions, whole models, and files made to mislead."""

from __future__ import annotations

import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ModelError  # noqa: E402
from shoal.model import FAMILIES, huggingface  # noqa: E402
from shoal.model.config import RopeScaling  # noqa: E402
from shoal.model.gguf_blocks import decode  # noqa: E402
from shoal.model.gguf_header import BLOCKS, read_header  # noqa: E402
from shoal.model.rope import frequencies  # noqa: E402

from .conftest import CONFIGS  # noqa: E402

NUMBERS = {name: number for number, (name, _, _) in BLOCKS.items()}
HALF = struct.Struct("<e")


# What each block means, element by element.


def q4_0(raw):
    d = HALF.unpack(raw[:2])[0]
    low, high = [b & 15 for b in raw[2:]], [b >> 4 for b in raw[2:]]
    return [(q - 8) * d for q in low + high]


def q8_0(raw):
    d = HALF.unpack(raw[:2])[0]
    return [(b - 256 if b > 127 else b) * d for b in raw[2:]]


def q4_k(raw):
    d, least = HALF.unpack(raw[:2])[0], HALF.unpack(raw[2:4])[0]
    packed, out = raw[4:16], []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        run = raw[16 + 32 * (group // 2) :][:32]
        codes = [b >> 4 if group % 2 else b & 15 for b in run]
        out += [d * scale * q - least * minimum for q in codes]
    return out


def q6_k(raw):
    low, high, scales = raw[:128], raw[128:192], struct.unpack("<16b", raw[192:208])
    d, out = HALF.unpack(raw[208:])[0], [0.0] * 256
    for half in range(2):
        for i in range(32):
            upper = high[32 * half + i]
            codes = [
                (low[64 * half + i] & 15) | (upper & 3) << 4,
                (low[64 * half + i + 32] & 15) | (upper >> 2 & 3) << 4,
                (low[64 * half + i] >> 4) | (upper >> 4 & 3) << 4,
                (low[64 * half + i + 32] >> 4) | (upper >> 6 & 3) << 4,
            ]
            for run, code in enumerate(codes):
                scale = scales[8 * half + 2 * run + i // 16]
                out[128 * half + 32 * run + i] = d * scale * (code - 32)
    return out


MEANT = {"Q4_0": q4_0, "Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k}
# Where a block has its fp16 numbers.
HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Random blocks whose scales are small numbers."""
    size = next(size for name, _, size in BLOCKS.values() if name == kind)
    raw = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    for number, block in enumerate(raw):
        for place in HALVES[kind]:
            block[place : place + 2] = np.frombuffer(HALF.pack(0.01 + number / 64), np.uint8)
    return raw


@pytest.mark.parametrize("kind", MEANT)
def test_blocks_mean_what_they_say(kind):
    raw = blocks(kind, 5)
    expected = [MEANT[kind](bytes(block)) for block in raw]
    text = decode(kind, raw.reshape(-1), (5, len(expected[0])))
    np.testing.assert_allclose(text.numpy(), np.array(expected), rtol=1e-6, atol=1e-7)


def test_plain_types():
    values = torch.tensor([[1.5, -2.25], [0.0, 3.0]])
    assert torch.equal(decode("F32", values.numpy().view(np.uint8).ravel(), (2, 2)), values)
    half = values.half().numpy().view(np.uint8).ravel()
    assert torch.equal(decode("F16", half, (2, 2)), values)
    brain = values.bfloat16().view(torch.int16).numpy().view(np.uint8).ravel()
    assert torch.equal(decode("BF16", brain, (2, 2)), values)


# Files, as llama.cpp's converter writes them.


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack("<II", 4, value)


def gguf(values: dict, tensors: dict, version: int = 3, align: int = 32) -> bytes:
    """tensors: name -> (type number, shape rows first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    head += b"".join(text(key) + entry(value) for key, value in values.items())
    offset, data = 0, b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        data += raw + b"\0" * (-len(raw) % align)
        offset = len(data)
    return head + b"\0" * (-len(head) % align) + data


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def named(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for theirs, short in NAMES.items():
        name = name.replace(theirs, short)
    return name


def converted(model, arch: str, **more) -> tuple[dict, dict]:
    config = model.config
    values = {
        "general.architecture": arch,
        f"{arch}.embedding_length": config.hidden,
        f"{arch}.block_count": config.num_layers,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.feed_forward_length": config.ffn_hidden,
        f"{arch}.context_length": config.max_position,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.tokens": ["a", "b", "ü"],
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }
    names = FAMILIES.build(config.family).names(config)
    state = dict(model.named_parameters())
    tensors = {}
    for ours, pieces in names.items():
        parts = torch.split(state[ours].detach().reshape(-1), [p.numel for p in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            value = part.view(piece.shape)
            if arch == "llama" and (".q_proj." in piece.name or ".k_proj." in piece.name):
                heads = config.num_heads if ".q_proj." in piece.name else config.num_kv_heads
                rows = value.shape[0]
                value = value.reshape(heads, 2, rows // heads // 2, *value.shape[1:])
                value = value.swapaxes(1, 2).reshape(piece.shape)
            raw = value.contiguous().numpy().tobytes()
            tensors[named(piece.name)] = (0, tuple(piece.shape), raw)
    return values, tensors


@pytest.mark.parametrize(
    ("name", "arch"),
    [("llama", "llama"), ("llama-bias", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_models_are_read_as_they_were(name, arch, make, tmp_path):
    model = make(CONFIGS[name])
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(*converted(model, arch)))
    again = huggingface.read(file)
    assert again.config == CONFIGS[name].model_copy(
        update={"name": "model", "eos_token_id": 2, "initializer_range": 0.02}
    )
    for (key, a), (other, b) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert key == other
        assert torch.equal(a, b)
    assert huggingface.read(file, torch.bfloat16).embed.weight.dtype == torch.bfloat16


def test_few_bits_become_plain_weights(make, tmp_path):
    config = CONFIGS["qwen2"]
    values, tensors = converted(make(config), "qwen2")
    raw = blocks("Q8_0", 64 * 96 // 32)
    tensors["blk.1.ffn_down.weight"] = (NUMBERS["Q8_0"], (64, 96), raw.tobytes())
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(values, tensors))
    result = huggingface.read(file).blocks[1].mlp.down_proj.weight
    assert torch.equal(result, decode("Q8_0", raw.ravel(), (64, 96)))


def test_the_scaling_of_llama_3_is_found_again(make, tmp_path):
    scaling = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)
    config = CONFIGS["llama"].model_copy(update={"rope_theta": 5e5})
    scaled, _ = frequencies(config.model_copy(update={"rope_scaling": scaling}), 1)
    factors = (frequencies(config, 1)[0] / scaled).numpy()
    assert factors.max() == 8
    values, tensors = converted(make(config), "llama")
    tensors["rope_freqs.weight"] = (0, factors.shape, factors.tobytes())
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf(values, tensors))
    assert huggingface.read_config(file).rope_scaling == scaling
    tensors["rope_freqs.weight"] = (0, factors.shape, (factors * 1.5).tobytes())
    file.write_bytes(gguf(values, tensors))
    with pytest.raises(ModelError, match="no rope scaling that is read"):
        huggingface.read_config(file)


def refused(tmp_path, raw: bytes) -> str:
    file = tmp_path / "bad.gguf"
    file.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_files_that_claim_more_than_they_have(tmp_path):
    """Refused by the numbers alone: nothing of the claimed size comes into being."""
    huge = 10**12
    claims = gguf({}, {"x": (0, (10**6, 10**6), b"")}).ljust(1024, b"\0")
    assert len(claims) == 1024
    assert "claims 1000000000000 elements" in refused(tmp_path, claims)
    start = b"GGUF" + struct.pack("<I", 3)
    assert "number of tensors claims" in refused(
        tmp_path, (start + struct.pack("<QQ", huge, 0)).ljust(1024, b"\0")
    )
    assert "number of keys claims" in refused(
        tmp_path, (start + struct.pack("<QQ", 0, huge)).ljust(1024, b"\0")
    )
    one = start + struct.pack("<QQ", 0, 1)
    assert "a key claims" in refused(tmp_path, (one + struct.pack("<Q", 2**63)).ljust(1024, b"\0"))
    for inner in (0, 8, 9, 12):
        array = text("k") + struct.pack("<IIQ", 9, inner, huge)
        assert "claims 1000000000000 entries" in refused(tmp_path, (one + array).ljust(1024, b"\0"))


def test_damaged_files(tmp_path):
    good = gguf({"k": "v"}, {"x": (0, (2, 2), b"\0" * 16), "y": (0, (8,), b"\0" * 32)})
    file = tmp_path / "good.gguf"
    file.write_bytes(good)
    assert set(read_header(file).tensors) == {"x", "y"}
    for cut in (0, 3, 10, 30, 60, len(good) - 8):
        refused(tmp_path, good[:cut])
    assert "begin with GGUF" in refused(tmp_path, b"GGML" + good[4:])
    assert "version is 1" in refused(tmp_path, b"GGUF" + struct.pack("<I", 1) + good[8:])
    assert "Q5_K" in refused(tmp_path, gguf({}, {"x": (13, (1, 256), b"\0" * 176)}))
    assert "multiple of 32" in refused(tmp_path, gguf({}, {"x": (2, (1, 33), b"\0" * 64)}))
    twice = text("k") + entry(1)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + twice + twice
    assert "stands twice" in refused(tmp_path, head)
    assert "alignment" in refused(tmp_path, gguf({"general.alignment": 3}, {}))
    nested = text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40
    assert "unknown type" in refused(
        tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested + b"\0" * 512
    )
    over = gguf({}, {"x": (0, (64,), b"\0" * 256), "y": (0, (8,), b"\0" * 32)})
    place = over.index(b"y") + 1 + 4 + 8 + 4
    refused(tmp_path, over[:place] + struct.pack("<Q", 32) + over[place + 8 :])


def test_models_that_are_not_read(make, tmp_path):
    values, tensors = converted(make(CONFIGS["llama"]), "llama")
    file = tmp_path / "m.gguf"

    def said(changes: dict, more: dict | None = None, less: str = "") -> str:
        kept = {name: t for name, t in {**tensors, **(more or {})}.items() if name != less}
        file.write_bytes(gguf({**values, **changes}, kept))
        with pytest.raises(ModelError) as caught:
            huggingface.read(file)
        return str(caught.value)

    assert "expected one of llama" in said({"general.architecture": "mamba"})
    assert "experts" in said({"llama.expert_count": 8})
    assert "blk.1.ffn_up.weight is missing" in said({}, less="blk.1.ffn_up.weight")
    assert "no part of a model" in said({}, {"blk.0.odd.weight": (0, (4,), b"\0" * 16)})
    assert "shape [4]" in said({}, {"output_norm.weight": (0, (4,), b"\0" * 16)})
    assert "rope.scaling.type" in said({"llama.rope.scaling.type": "longrope"})
    assert "head_dim" in said({"llama.attention.key_length": 7})
    assert "num_heads" in said({"llama.attention.head_count": "many"})
