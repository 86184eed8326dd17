"""[85] Long context at the peak: do four formulas give the paper's figures and real times?

Source: Fu, Challenges in Deploying Long-Context Transformers: A Theoretical Peak Performance
Analysis, 2024.

Two things of the paper's arithmetic must be named. It counts a prompt's attention as ``L S^2 h``,
half of what a causal mask leaves; the exact count gives 17.8 s where it has 14, and both are
recorded. And it writes GiB of cache as GB, so a G of bytes is 2^30 here; a K of its short context
is 1024 and of its long one 1000. On this machine the formulas are held against a real model, from
512 to 16 K tokens, with peaks of the same run. The A/A run predicts by weights alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.errors import require
from shoal.core.measure import interleave
from shoal.core.parts import part
from shoal.cost.longctx.peak import LongContext, LongModel, Peaks
from shoal.cost.shapes import find
from shoal.kernel.threads import torch_threads

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.serve.engine.runner import LocalRunner

_G = 2.0**30
# Variant -> key/value heads, tokens that are kept.
_VARIANTS: dict[str, tuple[int, int | None]] = {
    "MHA": (4, None),
    "GQA": (2, None),
    "MQA": (1, None),
    "window": (4, 512),
}
_BLOCK = 16


def _blind(model: LongModel) -> LongModel:
    """The model as if it had no context: hardly any cache, and no attention."""
    return replace(model, kv_bytes=model.kv_bytes * 1e-6, width=0)


def paper_figures(
    *, blind: bool = False, attention: str = "paper"
) -> dict[str, tuple[float, float]]:
    """Figure -> (ours, the paper's); ``blind`` predicts by weights alone."""
    model = replace(
        LongModel.of(find("Yi-34B-200K")), params=34e9, last_params=0.0, weight_bytes=68 * _G
    )
    device = Peaks(
        name="A100", flops=312e12, memory_bytes=80 * _G, bandwidth=2000 * _G, link=20 * _G
    )
    one = LongContext(
        model=_blind(model) if blind else model,
        device=device,
        attention=attention,  # type: ignore[arg-type]
    )
    long, short = 50_000, 4096
    return {
        "cache at 50K, GiB": (one.model.cache_bytes(long) / _G, 11.4),
        "users at 50K": (one.concurrency(long), 1.0),
        "users at 4K": (one.concurrency(short), 12.0),
        "prompt of 50K, s": (one.prefill_s(long), 14.0),
        "prompt of 4K, s": (one.prefill_s(short), 0.9),
        "250 tokens at 50K, s": (250 * one.decode_s(long), 9.8),
        "250 tokens at 4K, s": (250 * one.decode_s(short), 8.5),
        "out and in at 50K, s": (2 * one.switch_s(long), 1.1),
    }


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds by context length, or of a variant."""

    prefill: dict[int, float]
    decode: dict[int, float]
    switch: dict[int, float]


@part
class LongCtx(BaseClaim, row=85, needs=("torch",)):
    """The four numbers of long context, of the paper and of this machine.

    Args:
        model: model of the zoo, with random weights.
        first: shortest context.
        last: longest context.
        repeats: times that a token and a switch are measured at each length.
        passes: times that all lengths are measured, each with peaks of its own.
    """

    model: str = "shoal-4m"
    first: int = 512
    last: int = 16_384
    repeats: Annotated[int, Ge(1)] = 48
    passes: Annotated[int, Ge(1)] = 15

    def __post_init__(self) -> None:
        require(
            _BLOCK <= self.first <= self.last <= 2**17 and self.first % _BLOCK == 0,
            "claim.longctx.first",
            self.first,
            expected=f"a multiple of {_BLOCK}, up to last = {self.last}, which is up to 131072",
        )

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        blind = run.as_baseline
        figures = paper_figures(blind=blind)
        run.put("paper_error", (abs(ours / theirs - 1) for ours, theirs in figures.values()))
        run.put("flop_error", self._flop_error(blind=blind))
        run.put("cache_byte_error", self._byte_error(blind=blind))
        run.details |= {
            "counted exactly": {
                name: ours
                for name, (ours, _) in paper_figures(attention="causal").items()
                if "prompt" in name
            },
        }
        if run.quick:
            return
        config = self._config(2)
        drifts: dict[str, list[float]] = {}
        run.remember("warm", lambda: self._lengths(config))
        for number in range(self.passes):
            run.progress(f"lengths, pass {number + 1}", 0.1 + 0.6 * number / self.passes)
            peaks, measured = run.remember(
                f"lengths {number}", lambda: (_peaks(), self._lengths(config))
            )
            ratios = self._ratios(config, peaks, measured, blind=blind)
            for name, of in ratios.items():
                drifts.setdefault(f"{name}_drift", []).append(max(of.values()) / min(of.values()))
        for metric, samples in drifts.items():
            run.put(metric, samples)
        run.progress("variants", 0.7)
        variants = run.remember(
            "variants", lambda: {name: self._variant(*kept) for name, kept in _VARIANTS.items()}
        )
        predicted = {name: self._predicted(name, peaks, blind=blind) for name in _VARIANTS}
        wrong = sum(
            (variants[a][what] > variants[b][what]) != (predicted[a][what] > predicted[b][what])
            for a, b in itertools.combinations(_VARIANTS, 2)
            for what in (0, 1)
        )
        run.put("wrong_orders", wrong)
        run.profile = (
            f"{self.last} tokens: prompt {measured.prefill[self.last]:.2f} s, token "
            f"{1e3 * measured.decode[self.last]:.2f} ms, out and in "
            f"{1e3 * measured.switch[self.last]:.2f} ms"
        )

    def _config(self, kv_heads: int) -> ModelConfig:
        from shoal.train import zoo

        return zoo.config(self.model).model_copy(
            update={"num_kv_heads": kv_heads, "max_position": self.last + _BLOCK}
        )

    def _long(self, config: ModelConfig, *, blind: bool) -> LongModel:
        model = LongModel.of(config.shape(), precision="fp32")
        return _blind(model) if blind else model

    def _flop_error(self, *, blind: bool) -> float:
        """Largest error of a prompt's FLOP against an operator count, of three variants."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        from shoal.model.transformer import Transformer

        worst = 0.0
        for kv_heads, tokens in ((4, 512), (2, 1024), (1, 256)):
            config = self._config(kv_heads)
            ours = self._long(config, blind=blind)
            counter = FlopCounterMode(display=False)
            model, fed = Transformer(config), torch.zeros(1, tokens, dtype=torch.int64)
            # By products that the counter knows; what the causal mask hides is counted there.
            with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                model(fed)
            counted = counter.get_total_flops() - 2 * (tokens - 1) * ours.last_params
            worst = max(worst, abs(ours.prefill_flops(tokens, "unmasked") / counted - 1))
        return worst

    def _byte_error(self, *, blind: bool) -> float:
        """Largest error of a cache's bytes against a real one, of three variants."""
        from shoal.serve.cache.paged import PagedCache

        worst = 0.0
        for kv_heads in (4, 2, 1):
            config = self._config(kv_heads)
            real = PagedCache(config, 32, _BLOCK).nbytes
            ours = self._long(config, blind=blind).cache_bytes(32 * _BLOCK)
            worst = max(worst, abs(ours / real - 1))
        return worst

    def _runner(self, config: ModelConfig) -> LocalRunner:
        """A runner with random weights, and a cache of the longest context."""
        from shoal.ir import ServeJob
        from shoal.serve.cache.host import HostCopyHook, HostMover, HostStore
        from shoal.serve.engine.build import engine_of, prepare
        from shoal.train import zoo

        job = ServeJob.model_validate(
            {
                "model": self.model,
                "precision": "fp32",
                "threads": 1,
                "kv": {"name": "paged", "block_size": _BLOCK},
                "kv_tokens": self.last,
                "max_running": 1,
            }
        )
        _, _, runner = engine_of(job, prepare(job, zoo.random(config)))
        mover = HostMover(runner.cache, HostStore(runner.cache, runner.cache.num_blocks))
        runner.hooks.add(HostCopyHook(mover))
        return runner

    def _lengths(self, config: ModelConfig) -> _Measured:
        """Prompt, token and switch at every length, the shortest first."""
        runner = self._runner(config)
        tokens = self.first
        lengths = _Measured({}, {}, {})
        _prefill(runner, tokens)
        while tokens <= self.last:
            again = max(1, min(5, 8192 // tokens))
            lengths.prefill[tokens] = min(_prefill(runner, tokens) for _ in range(again))
            lengths.decode[tokens] = _decode(runner, tokens, tokens, self.repeats)
            lengths.switch[tokens] = _switch(runner, tokens, self.repeats)
            tokens *= 2
        runner.hooks["host_copies"].close()
        return lengths

    def _variant(self, kv_heads: int, window: int | None) -> tuple[float, float]:
        """Seconds of a token, and of the way out and in, at the longest context."""
        runner = self._runner(self._config(kv_heads))
        kept = window or self.last
        result = (
            _decode(runner, self.last, kept, self.repeats),
            _switch(runner, kept, self.repeats),
        )
        runner.hooks["host_copies"].close()
        return result

    def _predicted(self, name: str, peaks: Peaks, *, blind: bool) -> tuple[float, float]:
        kv_heads, window = _VARIANTS[name]
        model = replace(self._long(self._config(kv_heads), blind=blind), window=window)
        one = LongContext(model=model, device=peaks)
        result = one.decode_s(self.last), 2 * one.switch_s(self.last)
        # By weights alone no variant costs more than another.
        return (0.0, 0.0) if blind else result

    def _ratios(
        self, config: ModelConfig, peaks: Peaks, measured: _Measured, *, blind: bool
    ) -> dict[str, dict[int, float]]:
        """Measured over predicted seconds by context length."""
        one = LongContext(model=self._long(config, blind=blind), device=peaks)
        predicted: dict[str, Callable[[int], float]] = {
            "prefill": one.prefill_s,
            "decode": one.decode_s,
            # What is alone has nothing to move, and so takes the same at every length.
            "switch": (lambda _: 1.0) if blind else (lambda tokens: 2 * one.switch_s(tokens)),
        }
        return {
            name: {n: took / predict(n) for n, took in getattr(measured, name).items()}
            for name, predict in predicted.items()
        }


def _peaks() -> Peaks:
    """What one core of this machine does at its best: a product, a sum, a copy."""
    import torch

    edge, numbers = 1024, 2**26
    with torch_threads(1):
        a = torch.randn(edge, edge)
        large, other = torch.ones(numbers), torch.empty(numbers)
        product = _best(lambda: a @ a)
        total = _best(large.sum)
        copied = _best(lambda: other.copy_(large))
    return Peaks(
        name="one core",
        flops=2 * edge**3 / product,
        memory_bytes=1e12,
        bandwidth=4 * numbers / total,
        link=4 * numbers / copied,
    )


def _best(work: Callable[[], object]) -> float:
    """Least s of a few runs."""
    return min(interleave({"it": work}, 8, warmup=0).seconds["it"])


def _prefill(runner: LocalRunner, tokens: int) -> float:
    """Seconds of a prompt."""
    from shoal.ir import Chunk, Request, SamplingParams, Step

    request = Request("prompt", [7] * tokens, tokens, SamplingParams(max_tokens=1))
    request.blocks = list(range(tokens // _BLOCK))
    return runner.execute(Step((Chunk(request, 0, tokens),))).seconds


def _places(runner: LocalRunner, kept: int, repeats: int) -> list[Sequence[int]]:
    """Blocks of as many contexts as the cache holds, in turn: none is in a processor's cache."""
    width = kept // _BLOCK
    number = runner.cache.num_blocks // width
    return [range((n % number) * width, (n % number + 1) * width) for n in range(repeats)]


def _decode(runner: LocalRunner, tokens: int, kept: int, repeats: int) -> float:
    """Median seconds of the next token of a context, of which ``kept`` tokens are seen."""
    import torch

    from shoal.serve.cache.attention import PagedAttention
    from shoal.serve.cache.attention import RequestContext as Seen

    model, cache = runner.model, runner.cache
    fed, place = torch.tensor([7]), torch.tensor([tokens - 1])
    took = []
    for blocks in _places(runner, kept, repeats):
        start = time.perf_counter()
        with torch.inference_mode():
            slot = torch.tensor([blocks[-1] * _BLOCK + _BLOCK - 1])
            seen = [Seen(kept - 1, 1, blocks)]
            mixer = PagedAttention(cache, seen, slot, cache.dtype, runner.attention)
            hidden = model.flat(fed, place, mixer)
            assert hidden is not None
            logits = model.logits(hidden)
            assert logits is not None
            logits.argmax()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _switch(runner: LocalRunner, kept: int, repeats: int) -> float:
    """Median seconds of moving a context to the host and back."""
    from shoal.ir import Copy, Transfer
    from shoal.serve.cache.host import HostCopyHook

    copies, took = runner.hooks["host_copies"], []
    assert isinstance(copies, HostCopyHook)
    mover = copies.mover
    assert mover is not None
    for turn, blocks in enumerate(_places(runner, kept, repeats)):
        run = (Copy(blocks[0], blocks[0], len(blocks)),)
        start = time.perf_counter()
        for at, kind in enumerate(("out", "in")):
            number = 2 * turn + at
            mover.begin((Transfer(number, kind, "", run),))  # type: ignore[arg-type]
            mover.wait((number,))
        took.append(time.perf_counter() - start)
        mover.over()
    return statistics.median(took)
