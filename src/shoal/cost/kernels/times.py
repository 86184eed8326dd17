"""Seconds of kernels on any accelerator, from the table that was measured on it or on its nearest.

A device without a table, or a format without one, takes the nearest table and scales a kernel's
time by its bound there over its bound here: operations over the device's rate, or bytes over its
memory's, whichever is longer, and the floor of a kernel.

Sources: Williams et al., Roofline, 2009; Xu et al., AIConfigurator, 2026 (kernel tables).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from shoal.core.errors import ConfigError
from shoal.cost.gpu.device import Accelerator
from shoal.cost.kernels.bounds import FLOOR_S, FORMATS, expert_bound_s
from shoal.cost.kernels.tables import Grid, KernelTable, shipped

# The device whose table is nearest, by patterns of names in turn.
_NEAREST = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300_sxm"),
    (r"B200", "b200_sxm"),
    (r"H200|GH200", "h200_sxm"),
    (r"RTX[ -]?PRO|50[789]0|GB10\b", "rtx_pro_6000_server"),
    (r"L40|L4\b|40[6789]0|\bAda\b", "l40s"),
    (r"A100|A800|A40|A30|A10\b|A6000|30[6789]0|V100|T4\b", "a100_sxm"),
)
# Kernels of experts that take the same weights; the fastest one runs. One scale a tensor can be
# written as a scale for each block, but not the other way round.
_SAME_WEIGHTS = {
    "fp8": ("fp8", "fp8_block"),
    "mxfp4": ("mxfp4", "mxfp4_fp8"),
}
# Share of the memory's rate that elementwise kernels and copies of states reach.
_STREAMED = 0.85


def table_of(name: str) -> str:
    """The table for a device of this name; Hopper's where the name shows none."""
    matches = (table for pattern, table in _NEAREST if re.search(pattern, name, re.IGNORECASE))
    return next(matches, "h100_sxm")


@functools.cache
def kernel_times(device: Accelerator, own: KernelTable | None = None) -> KernelTimes:
    """The times of a device, each computed once.

    Args:
        device: that runs the kernels.
        own: what the user measured on such a device; it wins where it has the kernel.
    """
    return KernelTimes(device, shipped(table_of(device.name)), own)


class KernelTimes:
    """Seconds of kernels on one rank of a device.

    Args:
        table: measured on it, or on the nearest device.
        own: measured on it by the user, as far as it goes.
    """

    def __init__(
        self, device: Accelerator, table: KernelTable, own: KernelTable | None = None
    ) -> None:
        self.device, self.table, self.own = device, table, own
        self._own_grids = {} if own is None else own.grids
        self._flops = dict(device.peak).get("bf16") or device.rate("bf16")
        self._reach = device.rate("bf16") / self._flops
        self._units = dict(device.matmul).keys() | dict(device.peak).keys()
        self.product = functools.lru_cache(1 << 16)(self._product)
        self.experts = functools.lru_cache(1 << 14)(self._experts)
        self._nearest = functools.cache(self._attention)

    @property
    def measured(self) -> bool:
        """The table was measured on such a device, by its data sheet, and not on the nearest."""
        if {"gemm", "decode", "prompt"} <= {name.split("/")[0] for name in self._own_grids}:
            return True
        pairs = ((self._flops, self.table.flops), (self.device.stream, self.table.stream))
        return all(abs(own / other - 1.0) < 0.12 for own, other in pairs)

    def source(self, kernel: str, form: str = "bf16") -> str:
        """Whose table answers for a kernel: ``own``, the user's, or the shipped one of a device.

        Args:
            kernel: gemm, decode, prompt, or another family.
            form: of its weights, or of the cache.
        """
        return "own" if self._own_grid(f"{kernel}/{form}") else self.table.device

    def _own_grid(self, name: str, width: int = 128) -> Grid | None:
        """The user's own grid of this name, of the nearest width where there are several."""
        if not self._own_grids:
            return None
        if name in self._own_grids:
            return self._own_grids[name]
        known = [one for one in self._own_grids if one.startswith(f"{name}/")]
        near = min(known, key=lambda one: abs(int(one.split("/")[-1]) - width), default=None)
        return None if near is None else self._own_grids[near]

    def stream(self, nbytes: float) -> float:
        """Seconds to pass so many bytes through the memory, without a launch."""
        return nbytes / (_STREAMED * self.device.stream)

    def work(self, flops: float, share: float = 1.0) -> float:
        """Seconds of bf16 operations at a share of the device's rate."""
        return flops / (share * self._flops)

    def reads(self, form: str, rows: float) -> bool:
        """Reading the weights binds a product of so many rows, not its operations."""
        return 2.0 * rows / self._rate(form) < FORMATS[form].weight_bytes / self.device.stream

    def _scaled(self, form: str, known: str, bound: Callable[[str, float, float], float]) -> float:
        """Bound of the kernel here, in its own format, over that of the table's kernel."""
        here = bound(form, self._rate(form), self.device.stream)
        there = bound(known, self.table.flops * FORMATS[known].rate, self.table.stream)
        return (FLOOR_S + here) / (FLOOR_S + there)

    def _rate(self, form: str) -> float:
        """FLOP/s of products in a format: as of 16 bits on a device without units for it."""
        units = {"nvfp4": "fp4", "fp8_block": "fp8"}.get(form, form)
        rate = FORMATS[form].rate
        return self._flops * (rate if rate <= 1 or units in self._units else 1.0)

    def _format(self, family: str, form: str) -> str:
        """The format of a family's table that is nearest to ``form``."""
        near = {
            "nvfp4": ("nvfp4", "fp8", "bf16"),
            "int4": ("mxfp4", "bf16"),
            "mxfp4": ("mxfp4", "bf16"),
            "fp8_block": ("fp8_block", "fp8", "bf16"),
            "fp8": ("fp8", "fp8_block", "bf16"),
            "int8": ("bf16",),
        }.get(form, ("bf16",))
        known = self.table.experts if family == "experts" else self.table.grids
        prefix = "" if family == "experts" else f"{family}/"
        return next(one for one in near if f"{prefix}{one}" in known)

    def _product(self, form: str, m: float, n: float, k: float) -> float:
        """Seconds of a product [m, k] x [k, n] with weights in a format, quantization included."""
        if (own := self._own_grid(f"gemm/{form}")) is not None:
            return max(self.stream(n * k * FORMATS[form].weight_bytes), own.seconds(m, n, k))
        known = self._format("gemm", form)
        seconds = self.table.grids[f"gemm/{known}"].seconds(m, n, k)
        if known == "fp8_block" and "gemm/fp8" in self.table.grids:
            # Some of its kernels were timed with their launches, not from a recorded graph.
            seconds = min(seconds, 1.15 * self.table.grids["gemm/fp8"].seconds(m, n, k))

        def bound(form: str, rate: float, stream: float) -> float:
            size = n * k * FORMATS[form].weight_bytes + 2.0 * m * (n + k)
            return max(2.0 * m * n * k / rate, size / stream)

        # A table's kernel runs again and again on weights that a large cache keeps; a model's does
        # not find them there.
        least = self.stream(n * k * FORMATS[form].weight_bytes)
        if not self.measured:
            least = max(least, 2.0 * m * n * k / (self._rate(form) * self._reach))
        return max(least, seconds * self._scaled(form, known, bound))

    def _experts(
        self,
        form: str,
        tokens: float,
        hidden: float,
        inner: float,
        top_k: float,
        experts: float,
        parts: float,
    ) -> float:
        """Seconds of the experts of a mixture layer on one rank, their routing included.

        Args:
            form: of their weights.
            tokens: of all ranks.
            hidden: width of the residual stream.
            inner: width of an expert on a rank.
            top_k: experts that a token takes.
            experts: of the layer.
            parts: ranks that the experts are divided over.
        """
        shape = (hidden, inner, top_k, experts, parts)
        able = _SAME_WEIGHTS.get(form, (form,))
        known = [one for one in able if one in self.table.experts]
        ways = [(one, one) for one in known] or [(form, self._format("experts", form))]
        here = self._rate(form) / FORMATS[form].rate
        return min(
            self.table.experts[one].over_bound(tokens, *shape)
            * expert_bound_s(own, tokens, *shape, flops=here, stream=self.device.stream)
            for own, one in ways
        )

    def decode(
        self, form: str, width: int, batch: float, heads: float, kv_heads: float, before: float
    ) -> float:
        """Seconds of attention of one token of each sequence over its cached keys.

        Args:
            form: of the cache.
            width: of a head.
            batch: sequences.
            heads: heads of queries on this rank.
            kv_heads: heads of keys on this rank.
            before: tokens in the cache, on average.
        """
        sizes = (heads / kv_heads, batch * kv_heads, before)
        if (own := self._own_grid(f"decode/{form}", width)) is not None:
            return own.seconds(*sizes)
        known, grid = self._nearest("decode", form, width)
        keys = 2.0 * batch * kv_heads * width * before
        seconds = grid.seconds(*sizes)
        return seconds * self._streamed(keys, form, known)

    def prompt(self, width: int, heads: float, tokens: float, before: float) -> float:
        """Seconds of causal attention of chunks of prompts, behind tokens in the cache.

        Args:
            width: of a head.
            heads: of queries on this rank, times the chunks.
            tokens: of a chunk.
            before: tokens in the cache before it.
        """
        if (own := self._own_grid("prompt/bf16", width)) is not None:
            return _behind(own, heads, tokens, before)
        _, grid = self._nearest("prompt", "bf16", width)
        work = 2.0 * heads * width * tokens * tokens
        return _behind(grid, heads, tokens, before) * self._computed(work)

    def latent_decode(self, form: str, heads: float, batch: float, before: float) -> float:
        """Seconds of latent attention of one token of each sequence over its cache."""
        known = form if f"latent_decode/{form}" in self.table.grids else "bf16"
        seconds = self.table.grids[f"latent_decode/{known}"].seconds(heads, batch, before)
        return seconds * self._streamed(576.0 * batch * before, form, known)

    def latent_prompt(self, heads: float, tokens: float, before: float) -> float:
        """Seconds of latent attention of chunks of prompts: see :meth:`prompt`."""
        grid = self.table.grids["latent_prompt/bf16"]
        work = 320.0 * heads * tokens * tokens
        return _behind(grid, heads, tokens, before) * self._computed(work)

    def collective(self, op: str, ranks: int, nbytes: float) -> float:
        """Seconds of an all_reduce, alltoall, all_gather or reduce_scatter of so many bytes."""
        if ranks <= 1:
            return 0.0
        near = min(ranks, self.device.domain)
        # The table counts numbers of 16 bits.
        seconds = self.table.grids[f"collective/{op}"].seconds(near, nbytes / 2.0)
        here, there = nbytes / self.device.inside, nbytes / self.table.inside
        seconds *= (FLOOR_S + here) / (FLOOR_S + there)
        if ranks > near:
            # A sum crosses once, there and back, for all devices of a node; tokens go each alone.
            apart = nbytes * (1.0 - near / ranks)
            crossing = apart if op == "alltoall" else 2.0 * nbytes / near
            seconds += self.device.far_s + crossing / self.device.outside
        return seconds

    def _attention(self, family: str, form: str, width: int) -> tuple[str, Grid]:
        """(format, grid) of the nearest kernel: of the format, then of the width."""
        grids = self.table.grids
        for one in (form, "bf16"):
            for near in sorted((64, 128, 256), key=lambda known: abs(known - width)):
                if (grid := grids.get(f"{family}/{one}/{near}")) is not None:
                    return one, grid
        raise ConfigError(
            f"kernel table {self.table.device}: no {family} attention; write the table again with "
            "scripts/kernel-tables"
        )

    def _streamed(self, numbers: float, form: str, known: str) -> float:
        """Time to read cached numbers here over that of the table's kernel."""
        here = numbers * FORMATS[form].weight_bytes / self.device.stream
        there = numbers * FORMATS[known].weight_bytes / self.table.stream
        return (FLOOR_S + here) / (FLOOR_S + there)

    def _computed(self, work: float) -> float:
        here, there = self._flops, self.table.flops
        return (FLOOR_S + work / here) / (FLOOR_S + work / there)


def _behind(grid: Grid, heads: float, tokens: float, before: float) -> float:
    """Seconds of a chunk: the pairs that it adds to those before, at the rate of a long prompt.

    A short chunk behind many tokens reads them in long rows, and is no slower a pair than they.
    """
    whole = before + tokens
    share = 1.0 - (before / whole) ** 2
    return max(grid.seconds(heads, tokens), share * grid.seconds(heads, whole))
