"""Seconds of serving on one device or a few: a prompt, a step of decoding, a full load.

A prompt is bound by products, a step by the bytes of the weights that it reads and by the
cached keys and values of all sequences at work; a small step by kernels that follow each
other. Under full load as many sequences run as the memory left by the weights can cache.

Sources: Pope et al., Efficiently Scaling Transformer Inference, 2022; Kwon et al., vLLM, 2023
(batch limited by the cache); Zhu et al., NanoFlow, 2024 (throughput bound by products).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.arithmetic import linears, mixture_layers
from shoal.cost.gpu.spec import block_weights, latent_of
from shoal.ir import ModelShape

__all__ = ["Host", "Load", "ServeCalibration", "Server", "full_load_s", "prefill_s", "step_s"]


@dataclass(frozen=True)
class ServeCalibration:
    """The constants that measurements set.

    Args:
        products: share of the matrix rate that prompts reach.
        stream: share of the memory's rate that reading weights reaches.
        lanes: bytes that one unit streams in a cycle in a product with a vector.
        kernel_s: seconds of one small kernel with its gap, where kernels follow each other.
        step_s: seconds that an engine takes between steps, beside its kernels.
        cached: share of the memory's rate that attention over cached keys reaches.
        token_s: seconds of the host for one sequence of a step: sampling, bookkeeping, text.
    """

    products: float = 0.60
    stream: float = 0.88
    lanes: float = 8.0
    kernel_s: float = 5e-6
    step_s: float = 4e-3
    cached: float = 0.65
    token_s: float = 1e-5


@dataclass(frozen=True)
class Host:
    """A device that serves.

    Args:
        name: as published.
        flops: bf16 (or fp16) FLOP/s of its data sheet, dense.
        low: FLOP/s of eight-bit products; 0 where they run at ``flops``.
        least: FLOP/s of four-bit products; 0 where they run as eight-bit ones.
        stream: byte/s of its memory.
        capacity: bytes of its memory.
        lanes: units times cycles a second; 0 where the memory alone limits.
        units: units that share a product's tiles; 0 where tiles do not matter.
        wire: byte/s to its neighbours.
        hop_s: seconds of a small all-reduce among them.
        cpu: it is a CPU.
    """

    name: str
    flops: float
    stream: float
    capacity: float
    low: float = 0.0
    least: float = 0.0
    lanes: float = 0.0
    wire: float = 25e9
    hop_s: float = 12e-6
    cpu: bool = False
    units: int = 0


@dataclass(frozen=True)
class Server:
    """A model on devices under one engine.

    Args:
        shape: the model.
        host: one of its devices.
        tp: devices that share every layer.
        stages: devices that share the layers one after the other.
        experts_dp: devices that each run their own requests and share the experts.
        weight_bytes: bytes of one weight.
        kv_bytes: bytes of one cached number.
        dtype: type of products: bf16, fp8 or fp4.
        kernels: kernels of a block.
        gap: share of ``kernel_s`` that a kernel costs, where graphs or streams hide some of it.
        step: share of ``step_s`` that the engine takes.
        overlap: prompts and steps share a pass, so that products hide reading.
        most: most sequences of a step.
        quantised: products unpack the weights first.
        products: share of the usual efficiency of products that this engine has.
        dense_bytes: bytes of a weight outside experts, where they differ.
        chunk: most tokens of one pass of a prompt.
        plain: each unit reads its own rows of a matrix, so that units limit what is read.
    """

    shape: ModelShape
    host: Host
    tp: int = 1
    stages: int = 1
    experts_dp: int = 1
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    dtype: str = "bf16"
    kernels: float = 10.0
    gap: float = 1.0
    step: float = 1.0
    overlap: bool = False
    most: int = 256
    quantised: bool = False
    products: float = 1.0
    dense_bytes: float = 0.0
    chunk: float = 4096.0
    plain: bool = False


@dataclass(frozen=True)
class Load:
    """Requests of one kind.

    Args:
        prompt: tokens of a prompt.
        output: tokens of an answer.
    """

    prompt: float
    output: float


def _weights(shape: ModelShape) -> tuple[float, float]:
    """Weights outside experts, output layer included, and those of all experts."""
    dense, rest, experts = block_weights(shape)
    sparse = mixture_layers(shape)
    common = (shape.num_layers - sparse) * dense + sparse * rest
    return common + shape.vocab_size * shape.hidden, sparse * experts


def _met(shape: ModelShape, tokens: float) -> float:
    """Share of the experts that ``tokens`` tokens reach, drawn evenly."""
    if not shape.num_experts:
        return 0.0
    missed: float = (1.0 - shape.top_k / shape.num_experts) ** max(1.0, tokens)
    return 1.0 - missed


def kv_token_bytes(server: Server) -> float:
    """Bytes that one token keeps in the cache of all devices together."""
    shape = server.shape
    latent = latent_of(shape)
    if latent:
        return server.kv_bytes * shape.num_layers * (latent.kv + latent.rotary)
    each = 2.0 * shape.num_kv_heads * shape.head_dim * server.kv_bytes
    copies = max(1.0, server.tp / shape.num_kv_heads)
    return each * shape.num_layers * copies * _reach(shape, 1.0)


def _reach(shape: ModelShape, whole: float) -> float:
    """Share of the context that layers see, on average; half of gpt-oss's see 128 tokens."""
    return 0.55 * whole if "gpt-oss" in shape.name else whole


# Rows and columns of a tile that one unit computes.
TILE = 128.0
# What cores reach of their memory's rate, beside what a GPU does (STREAM on two-channel DDR5).
CPU_STREAM = 0.8
# Small experts and few rows of each leave the tiles of grouped products emptier.
GROUPED = 0.7


def _rate(server: Server, k: ServeCalibration, tokens: float) -> float:
    """FLOP/s of products with ``tokens`` rows."""
    host, shape = server.host, server.shape
    peak = {"fp4": host.least or host.low, "fp8": host.low}.get(server.dtype, 0.0) or host.flops
    share = k.products * server.products
    if server.quantised:
        if host.cpu and host.low:
            peak = host.low
        else:
            share *= 0.8
    if mixture_layers(shape):
        share *= GROUPED
    # As many rows as give every unit half a tile reach half the rate.
    width = 0.5 * (shape.hidden + (shape.ffn_hidden or shape.hidden)) / server.tp
    wave = 0.5 * TILE * TILE * host.units / width
    return share * peak * tokens / (tokens + max(16.0, wave))


def _flops(server: Server, tokens: float, context: float) -> float:
    """FLOP of one device for ``tokens`` tokens that see ``context`` tokens each."""
    shape = server.shape
    linear = float(sum(x.flops_per_token for x in linears(shape) if x.role != "output"))
    latent = latent_of(shape)
    if latent:
        common, experts = _weights(shape)
        share = shape.top_k / shape.num_experts if shape.num_experts else 0.0
        linear = 2.0 * (common + share * experts)
    width = shape.num_heads * (latent.plain + latent.rotary if latent else shape.head_dim)
    attention = 4.0 * shape.num_layers * width * _reach(shape, context)
    return tokens * (linear + attention) / (server.tp * server.experts_dp)


def _read(server: Server, k: ServeCalibration, tokens: float) -> float:
    """Seconds to read the weights that ``tokens`` tokens meet, on one device."""
    shape, host = server.shape, server.host
    common, experts = _weights(shape)
    low = server.weight_bytes
    high = server.dense_bytes or low
    size = (high * common + low * experts * _met(shape, tokens)) / server.tp
    if server.experts_dp > 1:
        size = high * common + low * experts * _met(shape, tokens) / server.experts_dp
    rate = k.stream * host.stream * (CPU_STREAM if host.cpu else 1.0)
    if server.plain and host.lanes and tokens < 8:
        rate = min(rate, k.lanes * host.lanes)
    return size / rate


def _hops(server: Server, k: ServeCalibration, tokens: float) -> float:
    """Seconds of all-reduces (or of experts' exchanges) of one pass."""
    host, shape = server.host, server.shape
    if server.tp > 1:
        size = 2.0 * tokens * shape.hidden
        share = 2.0 * (server.tp - 1) / server.tp
        each = host.hop_s + share * size / (0.7 * host.wire)
        return 2 * shape.num_layers * each
    if server.experts_dp > 1:
        size = tokens / server.experts_dp * shape.top_k * shape.hidden * 2.0
        return 2 * shape.num_layers * (2 * host.hop_s + size / (0.6 * host.wire))
    return 0.0


def _gaps(server: Server, k: ServeCalibration) -> float:
    return server.shape.num_layers * server.kernels * server.gap * k.kernel_s


def prefill_s(server: Server, k: ServeCalibration, tokens: float, before: float = 0.0) -> float:
    """Seconds of the pass of a prompt of ``tokens`` tokens behind ``before`` cached ones."""
    busy = _flops(server, tokens, before + tokens / 2) / _rate(server, k, min(tokens, server.chunk))
    return max(busy, _read(server, k, tokens)) + _gaps(server, k) + _hops(server, k, tokens)


def step_s(server: Server, k: ServeCalibration, batch: float, context: float) -> float:
    """Seconds of one step that adds a token to each of ``batch`` sequences."""
    own = batch / server.experts_dp
    cached = own * context * kv_token_bytes(server) / server.tp
    wait = _read(server, k, batch) + cached / (k.cached * server.host.stream)
    busy = _flops(server, batch, 1.0) / _rate(server, k, max(batch, 1.0))
    if latent := latent_of(server.shape):
        # Heads share one compressed key, which each of them multiplies in full.
        work = 2.0 * server.shape.num_heads * (2 * latent.kv + latent.rotary) / server.tp
        wait += own * context * server.shape.num_layers * work / (0.5 * server.host.flops)
    whole = max(wait, busy) if batch >= 4 else wait
    return whole + _gaps(server, k) + _hops(server, k, batch)


def batch_of(server: Server, load: Load) -> float:
    """Sequences that run together under full load: what the memory caches, at most ``most``."""
    common, experts = _weights(server.shape)
    low, high = server.weight_bytes, server.dense_bytes or server.weight_bytes
    devices = server.tp * server.stages * server.experts_dp
    copies = server.experts_dp
    held = high * common * copies + low * experts
    free = 0.9 * server.host.capacity * devices - held
    # A sequence holds its prompt and, on average, half of its answer.
    each = kv_token_bytes(server) * (load.prompt + 0.5 * load.output)
    if server.tp > 1 and latent_of(server.shape):
        each *= server.tp
    return max(1.0, min(float(server.most) * copies, free / each))


def full_load_s(server: Server, k: ServeCalibration, load: Load) -> float:
    """Seconds of the server for one request while it is never idle."""
    batch = batch_of(server, load)
    prompt = prefill_s(server, k, max(load.prompt, 4096.0)) * load.prompt / max(load.prompt, 4096.0)
    context = load.prompt + load.output / 2
    step = step_s(server, k, batch, context)
    step += server.step * (k.step_s + k.token_s * batch / server.experts_dp)
    decode = load.output * step / batch
    if not server.overlap:
        return prompt + decode
    # Products of all tokens in one pass hide the reading of weights and cache.
    busy = prompt + load.output * _flops(server, batch, 1.0) / batch / _rate(server, k, 1024.0)
    return max(busy, decode)
