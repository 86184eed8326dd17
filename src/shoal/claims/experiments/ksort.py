"""[132] K-sort: do sorted key channels make 12-bit block floats as good as 16-bit ones?

Source: Accurate Block Quantization in LLMs with Outliers, 2024.

Keys of a trained model with heads of 128 in block floats of 16 and 12 bits, with and without sorted
channels: as trained, and after every rotary pair of the key projection is multiplied by a lognormal
factor and that of the queries divided by it, which changes no score and gives keys the outliers of
large models. Judged is the share of the loss between 16 and 12 bits that sorting takes away. The
A/A run sorts nothing; the quick run has normal numbers. Attention over such pages is timed beside
PyTorch's over gathered ones, in bf16.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import llama
from shoal.claims.frame import ClaimRun
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.kernel.calls import PagedAttentionCall

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.protocols import Ready
    from shoal.model.transformer import Transformer

_MODEL = "shoal-4m-h128"
_HEAD = 128
_BLOCKS = (32, 64, 128)
_SIGMA = 1.0
_CALL = PagedAttentionCall(64, 1024, 32, 8, 128, 16, "bf16")
# Caches in turn, so that none is still in the last level of the processor's own.
_CACHES = 3
_KERNELS = ("cpp", "torch")


@part
class KSort(BaseClaim, row=132):
    """Scores and perplexity with keys in block floats, channels sorted or not.

    Args:
        eval_tokens: held-out tokens that every format predicts.
        samples: sequences of 256 tokens whose scores are compared.
        pairs: rounds of the timing of attention.
    """

    eval_tokens: Annotated[int, Ge(1024)] = 16384
    samples: Annotated[int, Ge(1)] = 4
    pairs: Annotated[int, Ge(3)] = 15

    def collect(self, run: ClaimRun) -> None:
        """Count; the full run also trains the model once, predicts and times, for minutes."""
        _count(run)
        if run.quick:
            return
        self._model(run)
        run.progress("timing attention", 0.9)
        self._attention(run)

    def _model(self, run: ClaimRun) -> None:
        from shoal.corpora.files import from_path
        from shoal.corpora.tokens import prepare
        from shoal.model import huggingface
        from shoal.model.ksort import ksort
        from shoal.train.quantize import calibration
        from shoal.train.zoo import trained

        context = run.context
        directory = run.remember(
            "model", lambda: Path(context.model) if context.model else trained(_MODEL)
        )
        data = from_path(str(context.data)) if context.data else "stdlib"
        config = huggingface.read_config(directory)
        size = config.head_dim
        require(size == _HEAD, "claim.ksort model head_dim", size, expected=f"{_HEAD}")
        text = run.remember(
            "text", lambda: prepare(data, str(directory / "tokenizer.json"), config.vocab_size)
        )
        tokens = calibration(
            text.heldout, samples=self.samples, length=256, vocab_size=config.vocab_size
        )
        perplexity: dict[tuple[str, str], float] = {}
        errors: dict[tuple[str, str], list[float]] = {}
        for at, kind in ((0.05, "trained"), (0.5, "outliers")):
            model, change = _read(directory, kind, tokens, context.seed)
            sorted_, _ = _read(directory, kind, tokens, context.seed)
            if not run.as_baseline:
                ksort(sorted_, by="weight", mode="pairs")
            if kind == "outliers":
                logit_change = change
            for name, form, each in _variants(model, sorted_):
                run.progress(f"{kind}: {name}", at)
                args = each, form, tokens, text.heldout, self.eval_tokens
                losses = functools.partial(_losses, *args)
                # What is not sorted is the same in both runs.
                same = "sorted" not in name
                result = run.remember(f"{kind} {name}", losses) if same else losses()
                perplexity[kind, name], errors[kind, name] = result
                run.details[f"{kind} {name}"] = {"perplexity": result[0]}

        def removed(table: dict[tuple[str, str], list[float]], n: int) -> list[float]:
            rows = (table["outliers", f"{name} {n}"] for name in ("bfp16", "bfp12", "sorted"))
            return [(b - c) / (b - a) for a, b, c in zip(*rows, strict=True)]

        of_text = {key: [value] for key, value in perplexity.items()}
        plain, moved = (perplexity["outliers", f"{name} 128"] for name in ("bfp12", "sorted"))
        run.put("gap_removed_32", removed(errors, 32))
        run.put("gap_removed_64", removed(errors, 64))
        run.put("perplexity_removed_32", removed(of_text, 32))
        run.put("perplexity_change_128", abs(moved / plain - 1))
        run.put("logit_change", logit_change)

    def _attention(self, run: ClaimRun) -> None:
        from shoal.kernel.base import roof_s
        from shoal.kernel.dispatch import kernels_of

        kernels = kernels_of(_CALL.op)
        reason = kernels["cpp"].refuses(_CALL)
        if reason is not None:
            run.skip(f"cpp {reason}", "attention_speedup")
            return
        rounds = _Rounds(run.seed)
        arms = {name: functools.partial(rounds, kernels[name].prepare(_CALL)) for name in _KERNELS}
        timed = run.race(arms, self.pairs, swaps={"cpp": "torch"})
        seconds = {name: statistics.median(timed[name]) for name in _KERNELS}
        machine, bound = run.context.machine, None
        if machine is not None:
            bound = seconds["torch"] / roof_s(_CALL, machine)
        run.put("attention_speedup", timed["cpp"], timed["torch"], bound=bound)


class _Rounds:
    """Calls of attention, each over the next of several caches."""

    def __init__(self, seed: int) -> None:
        import torch

        source = torch.Generator().manual_seed(seed)
        call, width = _CALL, _CALL.context // _CALL.block_size
        slots = call.batch * call.context
        shape = (slots, call.kv_heads, call.head_dim)
        self._q = torch.randn(call.batch, call.heads, call.head_dim, generator=source).bfloat16()
        self._blocks = torch.randperm(call.batch * width, generator=source).view(-1, width)
        self._lengths = torch.full((call.batch,), call.context)
        row = torch.randn(2, call.block_size, *shape[1:], generator=source).bfloat16()
        self._caches = [
            tuple(side.repeat(slots // call.block_size, 1, 1) for side in row)
            for _ in range(_CACHES)
        ]
        self._turn = 0

    def __call__(self, run: Ready) -> None:
        self._turn += 1
        keys, values = self._caches[self._turn % _CACHES]
        run(self._q, keys, values, self._blocks, self._lengths)


def _variants(
    model: Transformer, sorted_: Transformer
) -> list[tuple[str, str | None, Transformer]]:
    variants: list[tuple[str, str | None, Transformer]] = [("fp32", None, model)]
    for n in _BLOCKS:
        variants += [
            (f"bfp16 {n}", f"bfp16-b{n}", model),
            (f"bfp12 {n}", f"bfp12-b{n}", model),
            (f"sorted {n}", f"bfp12-b{n}", sorted_),
        ]
    return variants


def _read(directory: Path, kind: str, tokens_BT: Tensor, seed: int) -> tuple[Transformer, float]:
    """The model in fp32, with outliers where asked, and how far that moved its logits."""
    import torch

    from shoal.model import huggingface

    model = huggingface.read(directory, torch.float32, packed=False).eval()
    if kind == "trained":
        return model, 0.0
    with torch.inference_mode():
        before = model(tokens_BT[:1])
        _give_outliers(model, seed)
        return model, float((model(tokens_BT[:1]) - before).abs().max())


def _give_outliers(model: Transformer, seed: int) -> None:
    """Multiply rotary pairs of the keys by lognormal factors, and divide those of the queries."""
    import torch

    config = model.config
    heads, kv_heads, half = config.num_heads, config.num_kv_heads, config.head_dim // 2
    for layer, block in enumerate(model.blocks):
        source = generator(seed, purpose="outliers", index=layer)
        factor = torch.from_numpy(source.lognormal(0.0, _SIGMA, (kv_heads, half))).float()
        whole_Kd = factor.repeat(1, 2)
        each = torch.cat([1 / whole_Kd.repeat_interleave(heads // kv_heads, 0), whole_Kd])
        projection: Any = block.attention.qkv_proj  # type: ignore[union-attr]
        for tensor in (projection.weight, projection.bias):
            if tensor is not None:
                rows = tensor.data[: each.numel()]
                rows.mul_(each.view(-1, *[1] * (rows.dim() - 1)))


def _losses(
    model: Transformer, form: str | None, tokens_BT: Tensor, text: object, eval_tokens: int
) -> tuple[float, list[float]]:
    """Held-out perplexity with keys in a format, and the error of each layer's scores."""
    import torch

    from shoal.kernel.kv import kv_format
    from shoal.kernel.kv.ksort import score_error
    from shoal.model.ksort import captured, coded
    from shoal.train.kv import held_out_perplexity

    keys = None if form is None else kv_format(form)
    with coded(model, keys):
        perplexity = held_out_perplexity(model, text, max_tokens=eval_tokens)  # type: ignore[arg-type]
    if keys is None:
        return perplexity, [0.0] * len(model.blocks)
    with torch.inference_mode(), captured(model) as seen:
        model.hidden(tokens_BT)
    return perplexity, [score_error(keys, q[::2], k[::2]) for q, k in seen]


def _count(run: ClaimRun) -> None:
    """Bytes, and errors of normal numbers with lognormal sizes; no model is trained for it."""
    import torch

    from shoal.kernel.kv import kv_format
    from shoal.kernel.kv.ksort import channel_order, score_error

    gaps: dict[int, list[float]] = {32: [], 64: []}
    moved = []
    for draw in range(5):
        source = generator(run.seed, purpose="normal keys", index=draw)
        factor = torch.from_numpy(source.lognormal(0.0, _SIGMA, (2, _HEAD // 2))).float()
        size_Kd = factor.repeat(1, 2)
        q = torch.from_numpy(source.standard_normal((128, 2, _HEAD), dtype="float32")) / size_Kd
        k = torch.from_numpy(source.standard_normal((256, 2, _HEAD), dtype="float32")) * size_Kd
        order = None if run.as_baseline else channel_order(size_Kd)
        for n, result in gaps.items():
            high, low = kv_format(f"bfp16-b{n}"), kv_format(f"bfp12-b{n}")
            a, b = score_error(high, q, k), score_error(low, q, k)
            result.append((b - score_error(low, q, k, order)) / (b - a))
        whole = kv_format(f"bfp12-b{_HEAD}")
        there = channel_order(size_Kd).expand_as(k)
        plain = whole.decode(*whole.encode(k))
        after = whole.decode(*whole.encode(k.gather(-1, there)))
        moved.append(float((plain.gather(-1, there) != after).sum()))
    size = {
        name: sum(part.nbytes for part in kv_format(name).encode(k))
        for name in ("bfp16-b32", "bfp12-b32")
    }
    run.put("bytes_ratio", size["bfp16-b32"] / size[run.pick("bfp12-b32", "bfp16-b32")])
    run.put("normal_gap_removed_32", gaps[32])
    run.put("normal_gap_removed_64", gaps[64])
    run.put("score_change", _score_changes(run.seed))
    run.put("moved_codes_128", moved)


def _score_changes(seed: int) -> tuple[float, ...]:
    """How far sorting moves the scores of small models, by mode; grouped queries, with biases."""
    import torch

    from shoal.model.ksort import captured, ksort
    from shoal.model.transformer import Transformer

    config = llama(
        64, 2, 4, kv_heads=2, vocab=64, ffn=64, length=512, head_dim=32, attention_bias=True,
        family="qwen2",
    )  # fmt: skip
    tokens = torch.from_numpy(generator(seed, purpose="tokens").integers(0, 64, (1, 300)))
    changes = []
    for mode in ("pairs", "free"):
        model = Transformer(config)
        for parameter_seed, parameter in enumerate(model.parameters()):
            source = generator(seed, purpose="weights", index=parameter_seed)
            values = source.standard_normal(tuple(parameter.shape), dtype="float32")
            parameter.data = torch.from_numpy(values) * 0.1
        scores = []
        with torch.inference_mode():
            for _ in range(2):
                with captured(model) as seen:
                    model.hidden(tokens)
                q, k = seen[0]
                scores.append(torch.einsum("tkgd,skd->kgts", q.view(-1, 2, 2, 32), k))
                if len(scores) == 1:
                    ksort(model, mode=mode)
        changes.append(float((scores[0] - scores[1]).abs().max() / scores[0].abs().max()))
    return tuple(changes)
