"""Operators of one rank's passes on an accelerator, as the engine that runs them does.

The same list as :func:`shoal.cost.price.ops.operators` makes for a CPU: products by their sizes,
attention by the engine's kernel, chains of elementwise operators by the bytes that they move. What
an engine fuses, quantises, converts and launches is its :class:`~shoal.cost.gpu.spec.EngineSpec`.

Legend: n tokens of the micro-batch, D hidden, V vocabulary, c bytes of the compute type.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.cost.arithmetic import expert_parameters, linears, mixture_layers, parameters
from shoal.cost.gpu.spec import EngineSpec
from shoal.cost.latent import latent_of
from shoal.cost.price.ops import FrozenPasses, MemoryPasses, OpGroup, passing_weights, stage_share
from shoal.ir import ModelShape

# Counted from the operators, in widths of their input. Eagerly as torch dispatches those of
# torchtitan's block, bf16 with norms in fp32: an RMS norm is eight operators, rotary positions turn
# complex numbers, a layer norm is one kernel; branches add up the gradients of projections of one
# input.
PASSES: dict[str, dict[str, MemoryPasses]] = {
    "eager": {
        "norm": MemoryPasses(18, 46, 8, 16),
        "layer_norm": MemoryPasses(2, 5, 1, 2),
        "rotary": MemoryPasses(10, 11, 3, 4),
        "residual": MemoryPasses(3, 3, 1, 1),
        "gate": MemoryPasses(5, 9, 2, 3),
        "activation": MemoryPasses(2, 3, 1, 1),
        "branches": MemoryPasses(0, 9, 0, 3),
    },
    "gpu": {
        "norm": MemoryPasses(2, 4, 1, 2),
        "rotary": MemoryPasses(5, 5, 4, 5),
        "residual": MemoryPasses(3, 3, 1, 1),
        "gate": MemoryPasses(5, 13, 2, 5),
        "activation": MemoryPasses(2, 3, 1, 1),
    },
    "fused": {
        "norm": MemoryPasses(2, 3, 1, 1),
        "rotary": MemoryPasses(2, 2, 1, 1),
        "residual": MemoryPasses(3, 1, 1, 1),
        "gate": MemoryPasses(3, 5, 1, 1),
        "activation": MemoryPasses(2, 3, 1, 1),
    },
}
# Kernels of a block's forward pass in all, where an engine is not counted operator by operator:
# of its chains, of quantising, of routing, and of each expert where experts are not one product.
CALLS = {"fused": 22, "eager": 40}
CALLS_LOW, CALLS_ROUTED, CALLS_UNFUSED, CALLS_EXPERT, CALLS_EXPERT_LOW = 14, 40, 60, 9, 30
# The backward pass launches so many kernels for one of the forward pass.
BACK = 1.8
# So many of them are no products and no attention, which count their own gaps.
GAPS = 0.75
# Bytes that quantising one element of an operand reads and writes.
CAST = {"fp8": 4.0, "mxfp8": 4.0, "fp8-rows": 10.0, "fp4": 6.0, "nvfp4": 6.0}
# An eager operator is a plain stream, which reaches so much more of the memory's rate than a chain
# of reductions does: STREAM's 0.9 over 0.75 (McCalpin, 1995; BabelStream, 2017).
EAGER = 1.2
# Logits that Shoal's loss holds at a time.
LOGITS_CHUNK = 2**24


def products_of(engine: EngineSpec, precision: str) -> str:
    """Type of a block's products: what devices have a rate for."""
    wanted = engine.products or precision
    if wanted.startswith(("fp8", "mxfp8")):
        return "fp8"
    return "fp4" if wanted in ("fp4", "nvfp4") else wanted


def accelerated(
    shape: ModelShape,
    *,
    seq_len: int,
    microbatch: int,
    precision: str,
    engine: EngineSpec,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    vocab: int | None = None,
    experts: tuple[int, int] | None = None,
    frozen: FrozenPasses | None = None,
) -> tuple[OpGroup, ...]:
    """Everything that the fullest pipeline stage of one tensor rank runs for one micro-batch.

    Args:
        shape: the model.
        seq_len: tokens of a sequence.
        microbatch: sequences.
        precision: of the job; ``engine.products`` may be narrower.
        engine: how it is run.
        tp: tensor-parallel ranks.
        pp: pipeline stages, which share the blocks.
        sp: norms and residuals are divided over the tensor ranks.
        vocab: ranks that share the vocabulary; ``tp`` if not given.
        experts: ep and etp, where experts have a grid of their own; else the tensor ranks share
            the width of each.
        frozen: of weights without gradients; None where all are trained.
    """
    n = float(seq_len * microbatch)
    own = n / tp if sp else n
    share = stage_share(shape, pp)
    layers = share * shape.num_layers
    c = 4.0 if precision == "fp32" else 2.0
    passes = PASSES[engine.style]
    counted = engine.style not in CALLS
    dtype = products_of(engine, precision)
    plain = "fp32" if precision == "fp32" else "bf16"
    cast = CAST.get(engine.products, 4.0) if dtype in ("fp8", "fp4") else 0.0
    adds = 0.0 if engine.casts else engine.grad_bytes
    D = shape.hidden
    eager = engine.style == "eager"
    c /= EAGER if eager else 1.0
    ops: list[OpGroup] = []

    def memory(name: str, width: float, count: float, what: MemoryPasses, rows: float = n) -> None:
        ops.append(
            OpGroup(
                name,
                "memory",
                count=count,
                forward_bytes=what.forward * c * rows * width,
                backward_bytes=what.backward * c * rows * width,
                size_bytes=3 * c * rows * width,
                forward_calls=what.forward_calls if counted else 0,
                backward_calls=what.backward_calls if counted else 0,
            )
        )

    def product(
        name: str, count: float, M: float, N: float, K: float, *, groups: int = 1, type_: str = ""
    ) -> None:
        type_ = type_ or dtype
        ops.append(
            OpGroup(
                name,
                "matmul",
                count=count,
                M=M,
                N=N,
                K=K,
                groups=groups,
                dtype=type_,
                adds=adds,
                frozen=frozen is not None,
                forward_calls=1 if counted else 0,
                backward_calls=2 if counted else 0,
            )
        )
        if cast and type_ == dtype:
            ops.append(
                OpGroup(
                    f"{name}_cast",
                    "memory",
                    count=count,
                    forward_bytes=cast * groups * M * K,
                    backward_bytes=cast * groups * M * N,
                    size_bytes=cast * groups * M * K,
                    forward_calls=0,
                    backward_calls=0,
                )
            )

    ep, etp = experts or (1, tp)
    local = max(1, shape.num_experts // ep)
    for linear in linears(shape):
        if linear.role == "output":
            continue
        count, M, groups = linear.layers * linear.copies * share, n * linear.share, 1
        degree = tp
        if linear.role == "expert":
            # Of its tokens, which tp ranks share, a rank of experts has those of ep * etp ranks.
            M *= ep * etp / tp
            degree, count = etp, count / ep
            if not counted:  # Shoal computes one expert after the other
                count, groups = linear.layers * share, local
        N = linear.N / (degree if linear.divided == "outputs" else 1)
        K = linear.K / (degree if linear.divided == "inputs" else 1)
        product(linear.name, count, M, N, K, groups=groups)
    q, kv = (
        shape.num_heads / tp * shape.head_dim,
        2 * shape.head_dim * max(1.0, shape.num_kv_heads / tp),
    )
    head = value = float(shape.head_dim)
    if latent := latent_of(shape):
        head, value = float(latent.plain + latent.rotary), float(latent.value)
        q, kv = shape.num_heads / tp * head, shape.num_heads / tp * (latent.plain + value)
    ops.append(
        OpGroup(
            "attention",
            "attention",
            count=layers,
            heads=microbatch * shape.num_heads / tp,
            keys=float(seq_len),
            head_dim=head,
            value_dim=value,
            kernel=engine.attention,
            window=engine.window,
            forward_calls=1 if counted else 0,
            backward_calls=1 if counted else 0,
        )
    )
    norm = passes["layer_norm" if eager and not shape.gated else "norm"]
    memory("norm", D, 2 * layers, norm, own)
    if shape.qk_norm:
        memory("qk_norm", q + kv, layers, norm)
    if not eager:
        memory("rotary", q + kv, layers, passes["rotary"])
    elif shape.gated:
        # Values have no positions. Keys and values are repeated for the heads that share them.
        memory("rotary", q + kv / 2, layers, passes["rotary"])
        memory("branches", D, layers, passes["branches"], own)
        if kv < 2 * q:
            memory("repeat", 2 * q + kv, layers, MemoryPasses(1, 1, 2, 2))
    if counted:
        memory("values", kv, layers, MemoryPasses(2, 2, 1, 1))
    memory("residual", D, 2 * layers, passes["residual"], own)
    act = passes["gate"] if shape.gated else passes["activation"]
    sparse = mixture_layers(shape)
    dense = shape.num_layers - sparse
    if dense:
        memory("gate", shape.ffn_hidden / tp, dense * share, act)
    if sparse:
        X = shape.expert_hidden
        # Where experts have a grid, each tensor rank sends its own tokens to whole experts.
        routed = (n / tp if experts else n) * shape.top_k
        moved = 4.0 if engine.fused_experts else 8.0
        memory("dispatch", D, sparse * share, MemoryPasses(moved, moved, 4, 6), routed)
        memory("expert_gate", X / (1 if experts else tp), sparse * share, act, routed)
        if shape.num_shared_experts:
            memory("shared_gate", shape.num_shared_experts * X / tp, sparse * share, act)
    ops.append(_launches(engine, layers, sparse * share, local, bool(cast)))
    ops.extend(_held(shape, engine, precision, share, tp, experts, frozen))
    if counted:
        ops.append(
            OpGroup(
                "embedding",
                "memory",
                forward_bytes=14.0 * n * D,
                backward_bytes=18.0 * n * D + 8.0 * shape.vocab_size / (vocab or tp) * D,
                size_bytes=8.0 * n * D,
                recomputed=False,
            )
        )
        memory("final_norm", D, 1.0, passes["norm"])
        ops[-1] = replace(ops[-1], recomputed=False)
    ends = vocab or tp
    product("logits", 1.0, n, shape.vocab_size / ends, D, type_=plain)
    ops[-1] = replace(ops[-1], recomputed=False)
    cells = n * shape.vocab_size / ends
    ops.append(
        OpGroup(
            "loss",
            "memory",
            forward_bytes=0.6 * engine.loss_bytes * cells,
            backward_bytes=0.4 * engine.loss_bytes * cells,
            size_bytes=12.0 * min(cells, LOGITS_CHUNK),
            forward_calls=int(14 * max(1.0, cells / LOGITS_CHUNK)) if counted else 0,
            backward_calls=2 if counted else 0,
            recomputed=False,
        )
    )
    return tuple(ops)


def _launches(engine: EngineSpec, layers: float, sparse: float, local: int, cast: bool) -> OpGroup:
    """Kernels that the host launches one by one, where operators are not counted for themselves."""
    if engine.graphs:
        return OpGroup("launches", "memory", forward_calls=0, backward_calls=0)
    each = 0
    if sparse:
        # With one scale a tensor, Transformer Engine quantises expert by expert (current scaling).
        alone = cast and engine.products == "fp8"
        each = 0
        if alone or not engine.fused_experts:
            each = (CALLS_EXPERT_LOW if cast else CALLS_EXPERT) * local
    if engine.style not in CALLS:
        # Each expert is a handful of small operators of its own.
        return OpGroup(
            "experts",
            "memory",
            count=sparse,
            forward_calls=6 * local,
            backward_calls=10 * local,
        )
    calls = layers * (CALLS[engine.style] + (CALLS_LOW if cast else 0))
    calls += sparse * ((CALLS_ROUTED if engine.fused_experts else CALLS_UNFUSED) + each)
    return OpGroup(
        "launches",
        "memory",
        forward_calls=round(calls),
        backward_calls=round(BACK * calls),
        gaps=GAPS,
    )


def _held(
    shape: ModelShape,
    engine: EngineSpec,
    precision: str,
    share: float,
    tp: int,
    experts: tuple[int, int] | None,
    frozen: FrozenPasses | None,
) -> list[OpGroup]:
    """What passes over all weights of a rank: copies in the compute type, sums of gradients."""
    if not engine.casts:
        return []
    ep, etp = experts or (1, tp)
    held = parameters(shape) - (1 - tp / (ep * etp)) * expert_parameters(shape)
    local = held * share / tp
    return passing_weights(local, 5.0 * share * shape.num_layers, precision, frozen)
