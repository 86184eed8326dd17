"""Layers of few bits for the claim bipolar_int: recovered inside, or written plane by plane.

Shapes: M rows, N outputs, K inputs, w and a bits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.claims.experiments.tiny import corpus_of
from shoal.claims.frame import paired
from shoal.claims.protocols import PairedSamples
from shoal.core.measure import interleave
from shoal.corpora.heldout import heldout_chunks
from shoal.corpora.tokens import prepare
from shoal.ir import Machine
from shoal.kernel.calls import MatmulPlanesCall
from shoal.kernel.dispatch import kernels_of
from shoal.kernel.formats import weight_format
from shoal.kernel.native import function
from shoal.kernel.operators import tensors_in
from shoal.kernel.planes.engines import PlanesEngine, chosen
from shoal.kernel.planes.layout import join, pack
from shoal.kernel.planes.native import PlanesWeights, product, result, weights
from shoal.model.huggingface import read
from shoal.model.lowbit import LowBitLinear
from shoal.model.transformer import Transformer
from shoal.train import zoo
from shoal.train.qat import finetune, matrices


def odd(rows: int, k: int, bits: int, seed: int) -> Tensor:
    """Bipolar integers, int64 [rows, k]."""
    codes = torch.randint(0, 2**bits, (rows, k), generator=torch.Generator().manual_seed(seed))
    return codes.mul_(2).sub_(2**bits - 1)


def fused(
    planes_NwW: Tensor, m: int, k: int, a: int, machine: Machine
) -> Callable[[Tensor], Tensor]:
    """Exact integers by the engine that is chosen, recovered where they are computed."""
    n, w = planes_NwW.shape[:2]
    engine = chosen(m, n, k, w, a, k, machine)
    assert engine is not None
    held = weights(join(planes_NwW, k), w, a, tiles=engine.tiles)

    def run(planes_MaW: Tensor) -> Tensor:
        out = result(held, planes_MaW.shape[0])
        product(engine, held, planes_MaW, out)
        return out

    run.scratch = _scratch(engine, k, w)  # type: ignore[attr-defined]
    return run


def spilled(
    planes_NwW: Tensor, m: int, k: int, a: int, machine: Machine
) -> Callable[[Tensor], Tensor]:
    """What it is compared with: every product of two planes is written, then all are added.

    Each product is of one bit, by the engine that is fastest for it.
    """
    n, w = planes_NwW.shape[:2]
    engine = chosen(m, n, k, 1, 1, k, machine)
    assert engine is not None
    held: list[PlanesWeights] = [
        weights(join(planes_NwW[:, i : i + 1].contiguous(), k), 1, 1, tiles=engine.tiles)
        for i in range(w)
    ]

    def run(planes_MaW: Tensor) -> Tensor:
        rows = planes_MaW.shape[0]
        parts = torch.empty(w, a, rows, n, dtype=torch.int32)
        for j in range(a):
            plane = planes_MaW[:, j : j + 1].contiguous()
            for i in range(w):
                product(engine, held[i], plane, parts[i, j])
        out = torch.zeros(rows, n, dtype=torch.int32)
        for i, j in itertools.product(range(w), range(a)):
            out.add_(parts[i, j], alpha=2 ** (i + j))
        return out

    run.scratch = _scratch(engine, k, 1)  # type: ignore[attr-defined]
    return run


def _scratch(engine: PlanesEngine, k: int, w: int) -> int:
    """Bytes that the threads of an engine hold besides tensors."""
    if engine.block < 8:
        return 0
    return int(function("planes", "planes_scratch", "ll", "l")(k, w)) * torch.get_num_threads()


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, counts the bytes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._kept: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember every new storage, so that none is counted twice."""
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if at not in given and at not in self._kept:
                self._kept[at] = storage
                self.nbytes += storage.nbytes()
        return made


def packed(rows: int, k: int, bits: int, seed: int) -> Tensor:
    """Planes of random integers."""
    return pack(odd(rows, k, bits, seed), bits)


def _planes(m: int, size: int, w: int, a: int) -> Callable[[], Any]:
    call = MatmulPlanesCall(m=m, n=size, k=size, w=w, a=a, device="cuda")
    planes_w, planes_x = packed(size, size, w, 0).cuda(), packed(m, size, a, 1).cuda()
    ready = kernels_of(call.op)["triton"].prepare(call, planes_w)
    return lambda: ready(planes_x)


def timed(m: int, size: int, pairs: int, as_baseline: bool) -> tuple[PairedSamples, PairedSamples]:
    """W2A2 against bf16, W1A2 against int8: seconds of ten products each."""
    x, w = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for rows in (m, size))
    x8, w8 = (
        torch.randint(-127, 128, (rows, size), device="cuda", dtype=torch.int8)
        for rows in (m, size)
    )
    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: x @ w.T,
        "int8": lambda: torch._int_mm(x8, w8.T),
    }
    calls |= {
        "w2a2": calls["bf16"] if as_baseline else _planes(m, size, 2, 2),
        "w1a2": calls["int8"] if as_baseline else _planes(m, size, 1, 2),
    }

    def waited(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                call()
            torch.cuda.synchronize()

        return run

    seconds = interleave({name: waited(call) for name, call in calls.items()}, pairs).seconds
    return (
        paired(seconds["w2a2"], seconds["bf16"]),
        paired(seconds["w1a2"], seconds["int8"]),
    )


_CONTEXT = 256
_SCORED_TOKENS = 40_000


class ScoredModel:
    """A model (a name of the zoo, or a directory) and its held-out loss."""

    def __init__(
        self, model: str, data: Path | None, progress: Callable[[str, float], None]
    ) -> None:
        progress(f"training {model}, unless that was done before", 0.6)
        ours = model in zoo.names()
        place = zoo.trained(model) if ours else Path(model)
        self.model = read(place, torch.float32)
        tokenizer = "bpe" if ours and data is None else str(place)
        self.tokens = prepare(corpus_of(data), tokenizer, self.model.config.vocab_size)
        self.loss = self._loss(self.model)

    @torch.no_grad()
    def _loss(self, model: Transformer) -> float:
        """Nats a held-out token."""
        model.eval()
        total = counted = 0.0
        for batch in heldout_chunks(
            self.tokens.heldout, context=_CONTEXT, batch_tokens=4096, max_tokens=_SCORED_TOKENS
        ):
            data = torch.from_numpy(batch.tokens)
            scored = torch.from_numpy(batch.scored)
            targets = data[:, 1:].masked_fill(~scored, -100)
            total += float(model.loss_sum(data[:, :-1], targets))
            counted += float(scored.sum())
        return total / counted

    def few_bits(
        self,
        weights: str,
        activations: str,
        *,
        seconds: float | None,
        seed: int,
        progress: Callable[[str, float], None],
    ) -> float:
        """Nats a held-out token with few bits in all blocks, after ``seconds`` of finetuning."""
        model = copy.deepcopy(self.model)
        if seconds is None:
            fmt = weight_format(weights)
            codes = {
                f"{name}.weight": fmt.quantize(linear.weight)
                for name, linear in matrices(model).items()
            }
        else:
            codes = finetune(
                model, weights, activations, self.tokens.train, seconds=seconds, seed=seed,
                progress=lambda text, done: progress(text, 0.6 + 0.4 * done),
            )  # fmt: skip
        for name, linear in matrices(model).items():
            owner, _, last = name.rpartition(".")
            low = LowBitLinear.from_packed(
                codes[f"{name}.weight"], linear.bias, activations=activations
            )
            setattr(model.get_submodule(owner), last, low)
        return self._loss(model)
