"""A step's time on accelerators: the kernels of every layer, one after the other.

Products, attention, experts and collectives take what :mod:`shoal.cost.kernels` says of them at
the sizes of the step; elementwise kernels the bytes that they pass; the engine adds its own work.

Sources: Pope et al., Efficiently Scaling Transformer Inference, 2022; DeepSeek-AI, DeepSeek-V3,
2024 (latent attention with absorbed projections, experts over data-parallel attention); Yang et
al., Gated Delta Networks, 2025 (linear attention); Xu et al., AIConfigurator, 2026.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import embedding_parameters, mixture_layers
from shoal.cost.gpu.device import Accelerator
from shoal.cost.gpu.spec import block_weights, linear_of, whole_norm, window_of
from shoal.cost.kernels.bounds import FORMATS, reached
from shoal.cost.kernels.recorded import KernelCall, RecordedTimes
from shoal.cost.kernels.serving_engines import PLAIN, ServingEngine
from shoal.cost.kernels.tables import KernelTable
from shoal.cost.kernels.times import KernelTimes, kernel_times
from shoal.cost.latent import latent_of
from shoal.cost.step_cost.roofline import FILL, RUNTIME_BYTES, Terms
from shoal.ir import ModelShape

# Seconds between kernels that a recorded graph launches.
GAP_S = 2.2e-6
# Kernels of a layer that no table has: norms, positions, activation, cache.
_KERNELS = 5
# Rows up to which a product is one of a matrix with a vector, row by row.
_FEW = 8
# Without fused kernels: bytes that elementwise operators pass over those of fused ones, counted in
# llama.cpp's graph (288 for each number of the residual stream, 64 here); bytes for each score of a
# prompt's attention, which is written, scaled, masked and read in 32 bits; and bytes of weights
# that a unit takes in a cycle in a product of few rows (assumed).
_UNFUSED, _SCORE_BYTES, _CYCLE_BYTES = 4.5, 20.0, 8.0
# Products beside which traffic travels take longer, as in training.
_BESIDE = 1.15
# Kernels of experts whose tokens are exchanged: DeepGEMM's grouped products with scales by block,
# which no table has, reach the rate of those with one scale a tensor.
_DISPATCHED = {"fp8_block": ("fp8",)}
# Operators of an expert that is computed by itself: rows gathered, products, activation, sum.
_EXPERT = 6


@dataclass(frozen=True)
class ServingSplit:
    """How devices share the model.

    Args:
        tp: devices that share the attention of one batch of requests.
        replicas: groups of ``tp`` devices with separate requests that share the experts.
        expert_tp: devices that share an expert; 0 for ``tp * replicas / experts_over``.
        experts_over: devices that the experts are divided over.
        pp: stages.
    """

    tp: int = 1
    replicas: int = 1
    expert_tp: int = 0
    experts_over: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        world = self.tp * self.replicas
        own = self.expert_tp or max(1, world // self.experts_over)
        require(
            own * self.experts_over == world,
            "experts",
            f"{own} devices of an expert x {self.experts_over}",
            expected=f"{world}, the devices of attention: tp x replicas",
            error=PlanError,
        )
        object.__setattr__(self, "expert_tp", own)


@dataclass(frozen=True)
class Formats:
    """Formats of numbers.

    Args:
        dense: of weights outside experts.
        experts: of the experts' weights.
        kv: of cached keys and values.
        head: of the output matrix.
    """

    dense: str = "bf16"
    experts: str = "bf16"
    kv: str = "bf16"
    head: str = "bf16"


class _Step(NamedTuple):
    """What a step consists of, for one group of devices that share attention.

    Args:
        tokens: in it.
        decodes: sequences with one token.
        before: tokens that each of these has in the cache, on average.
        prompts: chunks of prompts: as many equal ones as have the same tokens and squares.
        length: tokens of such a chunk.
        behind: tokens before it.
    """

    tokens: float
    decodes: float
    before: float
    prompts: float = 0.0
    length: float = 0.0
    behind: float = 0.0


class AcceleratedStepCost:
    """Predicted seconds of steps of a model on accelerators, under an engine.

    Args:
        split: over which devices.
        formats: of weights and cache.
        own: kernels that the user measured on such a device.

    Raises:
        PlanError: heads that ``tp`` does not divide.
    """

    def __init__(
        self,
        device: Accelerator,
        shape: ModelShape,
        engine: ServingEngine,
        split: ServingSplit = ServingSplit(),
        formats: Formats = Formats(),
        own: KernelTable | None = None,
    ) -> None:
        require(
            shape.num_heads % split.tp == 0,
            "tp",
            split.tp,
            expected=f"a divisor of the {shape.num_heads} heads of {shape.name}",
            error=PlanError,
        )
        self.shape, self.engine, self.split, self.formats = shape, engine, split, formats
        self._device = device
        self._own = own
        self._times: KernelTimes | RecordedTimes = kernel_times(device, own)
        self._latent, self._linear = latent_of(shape), linear_of(shape)
        self._window, self._windowed = window_of(shape)
        self._dense = functools.lru_cache(4096)(self._dense_s)
        self._around = functools.lru_cache(4096)(self._around_s)

    @property
    def measured(self) -> bool:
        """Its kernels were measured on such a device, and not on the nearest."""
        return self._times.measured and self.engine.fused

    def most_requests(self, prompt: float, output: float) -> float:
        """Requests whose keys and values fit beside the weights, over all devices.

        Args:
            prompt: tokens of a prompt.
            output: tokens of an answer, of which half are there on average.
        """
        shape, split, own = self.shape, self.split, self.formats
        dense, rest, experts = block_weights(shape)
        mixtures = mixture_layers(shape)
        common = (shape.num_layers - mixtures) * dense + mixtures * rest
        held = split.replicas * common * FORMATS[own.dense].weight_bytes
        held += mixtures * experts * FORMATS[own.experts].weight_bytes
        held += split.replicas * embedding_parameters(shape) * FORMATS[own.head].weight_bytes
        devices = split.tp * split.replicas * split.pp
        each = FILL["gpu"] * self._device.capacity - RUNTIME_BYTES["gpu"]
        tokens = prompt + output * (1.0 if self.engine.reserves else 0.5)
        if latent := self._latent:
            kept = shape.num_layers * (latent.kv + latent.rotary) * split.tp * tokens
        else:
            width = 2.0 * max(shape.num_kv_heads, split.tp) * shape.head_dim
            seen = [(min(tokens, window or tokens), n) for window, n in self._windows]
            kept = width * sum(layers * keys for keys, layers in seen)
        return max(1.0, (devices * each - held) / (kept * FORMATS[own.kv].weight_bytes))

    @functools.cached_property
    def unscaled(self) -> AcceleratedStepCost:
        """The same by an engine that adds nothing to the fastest kernels."""
        return AcceleratedStepCost(self._device, self.shape, PLAIN, self.split, self.formats)

    @functools.cached_property
    def hidden(self) -> AcceleratedStepCost:
        """The same with steps so full of prompts that these hide their launches."""
        engine = replace(self.engine, eager_s=0.0)
        return AcceleratedStepCost(
            self._device, self.shape, engine, self.split, self.formats, self._own
        )

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.terms(chunks).total

    def counted_seconds(
        self, chunks: Sequence[tuple[int, int]], decodes: int, contexts: int
    ) -> float:
        return self.terms(chunks, decodes, contexts).total

    def terms(
        self, chunks: Sequence[tuple[int, int]], decodes: int = 0, contexts: int = 0
    ) -> Terms:
        """Seconds of a step of ``chunks`` (tokens before, tokens in it), by cause.

        Chunks are those of all replicas, which share them evenly; so are ``decodes`` beside them,
        after ``contexts`` tokens together.
        """
        many = self.split.replicas
        requests, keys = len(chunks) + decodes, contexts
        tokens = squares = pairs = 0
        for before, length in chunks:
            if length == 1:
                decodes += 1
                keys += before
            else:
                tokens += length
                squares += length * length
                pairs += length * before
        step = _Step(
            max(1.0, (decodes + tokens) / many),
            decodes=max(1.0, decodes / many) if decodes else 0.0,
            before=keys / decodes + 1.0 if decodes else 0.0,
            prompts=tokens * tokens / squares / many if tokens else 0.0,
            length=squares / tokens if tokens else 0.0,
            behind=pairs / tokens if tokens else 0.0,
        )
        tokens += decodes
        return self._terms(step, float(max(1, tokens)), max(1.0, requests / many))

    def decode_terms(self, sequences: float, before: float) -> Terms:
        """The same of a step of so many sequences in all replicas with so many tokens each."""
        own = max(1.0, sequences / self.split.replicas)
        return self._terms(_Step(own, own, before), max(1.0, sequences), own)

    def prompt_terms(self, prompts: float, tokens: int) -> Terms:
        """The same of whole prompts of every replica, without what the engine adds."""
        step = _Step(prompts * tokens, 0.0, 0.0, prompts, tokens)
        terms = self._terms(step, prompts * tokens * self.split.replicas, prompts)
        return terms._replace(overhead=0.0)

    def kernels(self, chunks: Sequence[tuple[int, int]]) -> tuple[list[KernelCall], Terms]:
        """The kernels that a step asks for, in order, and its seconds by cause."""
        asking = AcceleratedStepCost(
            self._device, self.shape, self.engine, self.split, self.formats, self._own
        )
        asking._times = recorded = RecordedTimes(kernel_times(self._device, self._own))
        terms = asking.terms(chunks)
        return recorded.calls, terms

    def _terms(self, step: _Step, tokens: float, chunks: float) -> Terms:
        engine, shape = self.engine, self.shape
        matmul, memory, communication, launches = self._around(
            step.tokens, tokens, step.decodes + step.prompts
        )
        attention = engine.kernels * self._attention(step)
        if not engine.fused:
            scores = step.prompts * step.length * (step.behind + step.length)
            heads = shape.num_heads / self.split.tp
            passed = self._times.stream(_SCORE_BYTES * heads * scores)
            memory += engine.kernels * shape.num_layers * passed
        overhead = engine.step_s + engine.sequence_s * chunks + engine.layer_s * shape.num_layers
        if not engine.graphs:
            # A device receives launches while it works; only what it does not hide counts.
            overhead += max(0.0, launches - matmul - attention - memory - communication)
        if step.prompts and step.tokens > engine.recorded:
            eager = engine.eager_s * shape.num_layers
            busy = matmul + attention + memory + communication
            overhead = max(overhead, eager - busy)
        if engine.overlap:
            # What products bind and what memory and links bind run beside each other.
            waits = attention + memory + communication
            matmul *= _BESIDE
            hidden = min(1.0, matmul / waits)
            attention, memory = (1.0 - hidden) * attention, (1.0 - hidden) * memory
            communication *= 1.0 - hidden
        return Terms(matmul, attention, memory, overhead, communication)

    def _around_s(
        self, own: float, tokens: float, rows: float
    ) -> tuple[float, float, float, float]:
        """(products, what memory binds, communication, launches) s around attention.

        Args:
            own: tokens of a group of devices that share attention.
            tokens: of all of them.
            rows: of logits.
        """
        shape, engine, times = self.shape, self.engine, self._times
        parts = 2 if engine.overlap else 1
        product, read, sums, moved = (
            parts * each for each in self._dense(own / parts, tokens / parts)
        )
        columns = shape.vocab_size / self.split.tp
        logits = self._product(self.formats.head, max(1.0, rows), columns, shape.hidden)
        logits += times.stream(8.0 * rows * columns) + 10 * GAP_S
        read += logits
        communication = engine.wire * (sums + moved)
        if self.split.pp > 1:
            size = own * shape.hidden * 2.0
            each = self._device.near_s + size / self._device.inside
            communication += (self.split.pp - 1) * each
        launches = self._launched(tokens) * self._device.launch_s
        return engine.kernels * product, engine.kernels * read, communication, launches

    def _launched(self, tokens: float) -> float:
        """Operators that are launched one by one: those of layers, and of each expert reached."""
        shape = self.shape
        operators = shape.num_layers * 3.0 * _KERNELS
        if mixtures := mixture_layers(shape):
            own = shape.num_experts / self.split.experts_over
            met = own * reached(tokens, shape.top_k, shape.num_experts)
            operators += mixtures * _EXPERT * met
        return operators

    def _attention(self, step: _Step) -> float:
        """Seconds of attention in all layers, its projections left out."""
        shape, split, times = self.shape, self.split, self._times
        heads = shape.num_heads / split.tp
        length, behind = step.length, step.behind
        seconds = 0.0
        if latent := self._latent:
            if step.decodes:
                seconds += times.latent_decode(self.formats.kv, heads, step.decodes, step.before)
                # Queries and answers pass the absorbed projections, head by head.
                weights = heads * latent.kv * (latent.plain + latent.value)
                work = 2.0 * step.decodes * weights
                seconds += 2 * GAP_S + max(times.stream(2.0 * weights), times.work(work, 0.5))
            if step.prompts:
                seconds += times.latent_prompt(heads * step.prompts, length, behind)
                expanded, rows = heads * (latent.plain + latent.value), step.prompts * length
                seconds += times.product(self.formats.dense, rows, expanded, latent.kv)
            return shape.num_layers * seconds
        kv_heads = max(1.0, shape.num_kv_heads / split.tp)
        for window, layers in self._windows:
            if step.prompts:
                whole = times.prompt(shape.head_dim, heads * step.prompts, length, behind)
                if window and length > window:
                    whole *= min(1.0, 2.0 * window / length + 0.1)
                seconds += layers * whole
            if step.decodes:
                seen = min(step.before, window) if window else step.before
                seconds += layers * times.decode(
                    self.formats.kv, shape.head_dim, step.decodes, heads, kv_heads, seen
                )
        if linear := self._linear:
            state = linear.value_heads / split.tp * linear.width**2
            each = 0.0
            if step.decodes:
                each += 10 * GAP_S + times.stream(8.0 * step.decodes * state)
            if step.prompts:
                each += 8 * GAP_S + times.work(8.0 * step.prompts * length * state, 0.15)
            seconds += linear.layers * each
        return seconds

    @functools.cached_property
    def _windows(self) -> list[tuple[int, float]]:
        """(tokens that a query sees at most, or 0; layers) of softmax attention."""
        layers = self.shape.num_layers - (self._linear.layers if self._linear else 0)
        windowed = self._windowed * layers
        return [(0, layers - windowed), *([(self._window, windowed)] if windowed else [])]

    def _dense_s(self, own: float, all_tokens: float) -> tuple[float, float, float, float]:
        """(products, what memory binds, sums, exchange) s of all layers, attention itself left out.

        Args:
            own: tokens of a group of devices that share attention.
            all_tokens: of all of them, which meet in the experts.
        """
        shape, split, times = self.shape, self.split, self._times
        form, hidden = self.formats.dense, shape.hidden

        def product(n: float, k: float, kind: str = form) -> float:
            return self._product(kind, own, n, k)

        traffic = 4.0 if self.engine.fused else _UNFUSED * 4.0

        def passed(width: float, kernels: int = 1) -> float:
            return kernels * GAP_S + times.stream(traffic * own * width)

        projections, around = self._projections(product, passed)
        mixtures = mixture_layers(shape)
        plain = shape.num_layers - mixtures
        products, elementwise = projections, around + 2 * shape.num_layers * passed(2 * hidden)
        if plain:
            inner = shape.ffn_hidden / split.tp
            products += plain * (
                product((1 + shape.gated) * inner, hidden) + product(hidden, inner)
            )
            elementwise += plain * passed(3 * inner)
        mixed = 0.0
        if mixtures:
            able = _DISPATCHED.get(self.formats.experts, ()) if split.replicas > 1 else ()
            mixed = mixtures * min(
                times.experts(
                    kernel,
                    all_tokens,
                    hidden,
                    shape.expert_hidden / split.expert_tp,
                    shape.top_k,
                    shape.num_experts,
                    split.experts_over,
                )
                for kernel in (self.formats.experts, *able)
            )
            each = product(shape.num_experts, hidden, "bf16")
            if shape.num_shared_experts:
                inner = shape.num_shared_experts * shape.expert_hidden / split.tp
                each += product(2 * inner, hidden) + product(hidden, inner)
                elementwise += mixtures * passed(3 * inner)
            products += mixtures * each
            elementwise += mixtures * 3 * GAP_S
        size = 2.0 * own * hidden
        sums = shape.num_layers * times.collective("all_reduce", split.tp, size)
        world = split.tp * split.replicas
        moved = 0.0
        if split.replicas == 1:
            sums += shape.num_layers * times.collective("all_reduce", world, size)
        elif mixtures:
            sums += plain * times.collective("all_reduce", split.tp, size)
            # Dispatched in eight bits, combined in sixteen; devices that share attention divide it.
            sent = own / split.tp * min(shape.top_k, world) * hidden
            there = times.collective("alltoall", world, sent)
            back = times.collective("alltoall", world, 2.0 * sent)
            moved = mixtures * (there + back)
        # A share of all tokens passes each expert.
        rows = all_tokens * shape.top_k / shape.num_experts if mixtures else 0.0
        bound = [0.0, elementwise]
        bound[times.reads(form, own)] += products
        bound[times.reads(self.formats.experts, rows)] += mixed
        return bound[0], bound[1], sums, moved

    def _product(self, form: str, rows: float, n: float, k: float) -> float:
        """Seconds of a product [rows, k] x [k, n] by the engine's kernels."""
        seconds, size = self._times.product(form, rows, n, k), FORMATS[form].weight_bytes
        if self.engine.fused:
            return seconds
        if rows < _FEW:
            turns = self._device.turns or math.inf
            read = n * k * size
            return GAP_S + max(self._times.stream(read), read / (_CYCLE_BYTES * turns))
        # Weights of few bits are unpacked to 16 before a product of many rows.
        return seconds + (self._times.stream((size + 2.0) * n * k) if size < 2.0 else 0.0)

    def _projections(
        self, product: Callable[..., float], passed: Callable[..., float]
    ) -> tuple[float, float]:
        """(products, elementwise) s of all layers around attention."""
        shape, split = self.shape, self.split
        hidden, heads = shape.hidden, shape.num_heads / split.tp
        if latent := self._latent:
            rank = latent.query or hidden
            down = latent.query + latent.kv + latent.rotary
            products = product(down, hidden) + product(heads * shape.head_dim, rank)
            products += product(hidden, heads * latent.value)
            around = passed(down + hidden, 4)
            return shape.num_layers * products, shape.num_layers * around
        kv_heads = max(1.0, shape.num_kv_heads / split.tp)
        width = shape.head_dim
        both = (heads + 2 * kv_heads) * width
        each = product(both, hidden) + product(hidden, heads * width)
        around = passed(both, 2)
        if whole_norm(shape):
            # Ranks sum the squares of their heads, in kernels of their own.
            around += passed(6 * both, 10)
            if split.tp > 1:
                around += self._times.collective("all_reduce", split.tp, 512.0)
        linear = self._linear
        layers = shape.num_layers - (linear.layers if linear else 0)
        products, elementwise = layers * each, layers * around
        if linear:
            keys, values = linear.key_heads / split.tp, linear.value_heads / split.tp
            inside = product(2 * (keys + values) * linear.width, hidden)
            inside += product(2 * values, hidden, "bf16") + product(hidden, values * linear.width)
            products += linear.layers * inside
            elementwise += linear.layers * 2 * GAP_S
        return products, elementwise
