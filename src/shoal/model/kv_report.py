"""What formats of the cache cost and lose, for one model.

Shapes: S tokens, H query heads, K key/value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.random import generator
from shoal.core.svg import Chart, Series, stacked
from shoal.kernel.kv import kv_format
from shoal.kernel.kv.ksort import Mode, channel_order, score_error
from shoal.kernel.protocols import KVFormat
from shoal.model.ksort import By, captured, channel_sizes
from shoal.model.transformer import Transformer

# Tokens whose scores are compared: every one with every other.
_TOKENS = 256


class FormatRow(Value):
    """One format of the cache.

    Args:
        format: its text.
        order: of the channels of the keys: none, pairs or free.
        token_bytes: of a token, keys and values of all layers.
        shrinks: by which factor that is less than in the type of the weights.
        score_error: of each layer: root mean square error of the scores, as a share of theirs.
        perplexity: on held-out text; None if not requested.
    """

    format: str
    order: str
    token_bytes: float
    shrinks: float
    score_error: tuple[float, ...]
    perplexity: float | None = None

    @property
    def mean_error(self) -> float:
        """Of all layers."""
        return sum(self.score_error) / len(self.score_error)


class KVReport(Value):
    """Sizes of the key channels of a model, and what its cache formats lose.

    Args:
        by: what determines a channel's size: weight or calibration.
        keys: what the errors are of: the keys of a text, or normal numbers of these sizes.
        sizes: of every layer, head and channel.
        rows: the formats.
        note: what else should be known.
    """

    model: str
    head_dim: int
    by: By
    keys: str
    sizes: tuple[tuple[tuple[float, ...], ...], ...]
    rows: tuple[FormatRow, ...]
    note: str = ""

    def picture(self, layers: Sequence[int] | None = None) -> str:
        """Sizes of the channels by place, before and after sorting, as SVG.

        Args:
            layers: which; all, if not given.
        """
        charts = []
        for layer in range(len(self.sizes)) if layers is None else layers:
            for head, sizes in enumerate(self.sizes[layer]):
                order = channel_order(torch.tensor([sizes]))[0].tolist()
                place = list(range(self.head_dim))
                charts.append(
                    Chart(
                        title=f"{self.model}: keys of layer {layer}, head {head}",
                        description="Size of each channel in the model's order, and sorted.",
                        x_label="place of the channel",
                        y_label="size",
                        series=[
                            Series("as trained", place, sizes, line=False, points=True),
                            Series("sorted by pairs", place, [sizes[c] for c in order]),
                        ],
                        height=240,
                    )
                )
        return stacked(charts)


@torch.no_grad()
def kv_report(
    model: Transformer,
    *,
    tokens_BT: Tensor | None = None,
    by: By = "weight",
    blocks: Sequence[int] = (32, 64, 128),
    seed: int = 0,
) -> KVReport:
    """Predict what each format of the cache would lose in this model.

    Args:
        model: with plain weights, its channels not sorted.
        tokens_BT: text; without it, keys are normal numbers as large as the weights give.
        by: what determines the size of a channel.
        blocks: numbers that share an exponent; those that do not divide a head are left out.
        seed: of the normal numbers.

    Raises:
        ModelError: the weights are packed or sorted, or text is needed and missing.
        KernelError: no block fits.
    """
    config = model.config
    fitting = [n for n in blocks if config.head_dim % n == 0]
    require(bool(fitting), "kv report blocks", list(blocks),
            expected=f"a divisor of heads of {config.head_dim}")  # fmt: skip
    sizes = channel_sizes(model, by=by, tokens_BT=tokens_BT)
    if tokens_BT is None:
        samples = [_normal(model, size_Kd, seed + layer) for layer, size_Kd in enumerate(sizes)]
    else:
        with captured(model) as seen:
            model.hidden(tokens_BT)
        samples = [(_some(q), _some(k)) for q, k in seen]
    dtype_bytes = model.embed.weight.element_size()

    def row(text: str, order: str = "none") -> FormatRow:
        form: KVFormat = kv_format(text)
        errors = []
        for (q, k), size_Kd in zip(samples, sizes, strict=True):
            mode: Mode | None = None if order == "none" else order  # type: ignore[assignment]
            errors.append(
                score_error(form, q, k, None if mode is None else channel_order(size_Kd, mode))
            )
        each = 2 * config.num_layers * config.num_kv_heads
        token = each * form.token_bytes(config.head_dim, dtype_bytes=dtype_bytes)
        return FormatRow(
            format=text,
            order=order,
            token_bytes=token,
            shrinks=each * config.head_dim * dtype_bytes / token,
            score_error=tuple(errors),
        )

    rows = [row("plain"), row("int8")]
    for block in fitting:
        rows.append(row(f"bfp16-b{block}"))
        for order in ("none", "pairs", "free"):
            if order == "none" or block < config.head_dim:
                rows.append(row(f"bfp12-b{block}", order))
    whole = [n for n in fitting if n >= config.head_dim]
    note = (
        f"a block of {whole[0]} is a whole head, where no order of channels matters"
        if whole
        else ""
    )
    return KVReport(
        model=config.name,
        head_dim=config.head_dim,
        by=by,
        keys="normal numbers" if tokens_BT is None else f"{tokens_BT.numel()} tokens of text",
        sizes=tuple(tuple(tuple(head) for head in size_Kd.tolist()) for size_Kd in sizes),
        rows=tuple(rows),
        note=note,
    )


def _normal(model: Transformer, size_Kd: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Queries all alike, and keys of these sizes."""
    config = model.config
    source = generator(seed, purpose="keys")
    q = source.standard_normal((_TOKENS, config.num_heads, config.head_dim), dtype="float32")
    k = source.standard_normal((_TOKENS, config.num_kv_heads, config.head_dim), dtype="float32")
    return torch.from_numpy(q), torch.from_numpy(k) * size_Kd.float()


def _some(x_SNd: Tensor) -> Tensor:
    step = max(1, len(x_SNd) // _TOKENS)
    return x_SNd[::step][:_TOKENS].float()
