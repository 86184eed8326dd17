"""Crossing everything: kernels x masks x lengths, methods x masks x lengths x ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.claims.bench.attention.masks import MASKS, build_mask, check_masks, real_lengths
from shoal.claims.bench.attention.values import (
    AttentionReport,
    AttentionSettings,
    ContextRow,
    KernelRow,
)
from shoal.core.errors import require
from shoal.core.parts import PartTable, table
from shoal.kernel.threads import torch_threads

# (what is being done, cells done, cells in all).
Progress = Callable[[str, float, float], None]


def chosen(text: str | Sequence[str], kind: str) -> tuple[str, ...]:
    """Names of ``all`` or of a list, with commas if it is a text; none of ``none``.

    Args:
        text: what a user wrote.
        kind: ``mask``, or the kind of the parts.

    Raises:
        UnknownPartError: a name that does not exist; lists those that do.
    """
    if not isinstance(text, str):
        text = ",".join(text)
    known: Sequence[str] = list(MASKS) if kind == "mask" else list(table(kind))
    if text.strip() == "all":
        return tuple(known)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names == ("none",):
        return ()
    require(bool(names), kind, text, expected=f"all, none, or some of {', '.join(known)}")
    if kind == "mask":
        check_masks(names)
    else:
        parts: PartTable = table(kind)
        for name in names:
            parts.load(name)
    return tuple(dict.fromkeys(names))


def run(
    settings: AttentionSettings,
    *,
    pool: Sequence[int] | None = None,
    progress: Progress = lambda text, done, total: None,
) -> AttentionReport:
    """Run every cell.

    Args:
        settings: what is compared.
        pool: lengths of documents; those of real files if not given.
        progress: called before each group of cells.

    Raises:
        ConfigError: a name or a number that cannot be.
        DataError: there are no real documents to take lengths from.
    """
    check_masks(settings.masks)
    kernels = {name: table("attention_kernel").build(name) for name in settings.kernels}
    methods = {name: table("context").build(name) for name in settings.methods}
    pool = real_lengths() if pool is None else pool
    import torch

    require(
        settings.device == "cpu" or torch.cuda.is_available(),
        "device",
        settings.device,
        expected="cpu on this machine, which has no GPU that torch can use",
    )
    from shoal.claims.bench.attention.context import AttentionCase, context_row
    from shoal.claims.bench.attention.kernels import kernel_rows

    # Work grows with the square of the length; so does a cell's share of the bar.
    units = [
        *(length**2 * len(kernels) for length in settings.lengths),
        *(length**2 * len(methods) * len(settings.ranks) for length in settings.context_lengths),
    ]
    total, done = float(sum(units) * len(settings.masks)), 0.0
    kernel_found: list[KernelRow] = []
    context_found: list[ContextRow] = []
    with torch_threads(settings.threads):
        for length in settings.lengths if kernels else ():
            for name in settings.masks:
                progress(f"kernels, {name} of {length}", done, total)
                mask = build_mask(name, length, block=settings.block, seed=settings.seed, pool=pool)
                kernel_found += kernel_rows(kernels, name, mask, settings)
                done += length**2 * len(kernels)
        for length in settings.context_lengths if methods else ():
            for name in settings.masks:
                mask = build_mask(name, length, block=settings.block, seed=settings.seed, pool=pool)
                case = AttentionCase.of(name, mask, settings)
                for ranks in settings.ranks:
                    progress(f"{ranks} ranks, {name} of {length}", done, total)
                    context_found += [
                        context_row(method, label, case, ranks, settings)
                        for label, method in methods.items()
                    ]
                    done += length**2 * len(methods)
    progress("", total, total)
    return AttentionReport(
        settings=settings,
        kernels=tuple(kernel_found),
        context=tuple(context_found),
        documents=len(pool),
    )
