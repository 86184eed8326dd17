"""Ladder residual: a sub-layer reads the stream without the sub-layer before it.

With sub-layers h_1, h_2, ... (attention and feed-forward in turn) and their outputs y_i::

    x_i = x_{i-1} + sum over ranks of y_{i-2}
    y_i = h_i(norm(x_i))

so the sum of y_i travels while h_{i+1} computes, and is waited for only where x_{i+2} is made.
The first two sub-layers see the embedding, and what is left at the end is added before the final
norm. One device computes the same function. Where a block is standard, it waits for all.

Source: Zhang et al., Ladder-Residual: Parallelism-Aware Architecture for Accelerating Large Model
Inference with Communication Overlapping, 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.model.dropout import ATTENTION, FEED_FORWARD, Drop

if TYPE_CHECKING:
    from shoal.model.attention import Mixer
    from shoal.model.norm import RMSNorm
    from shoal.model.transformer import Transformer, TransformerBlock

Late = Tensor | Callable[[], Tensor]
"""The output of a sub-layer: there, or on its way and waited for by the call."""

State = Tensor | tuple[Late, ...]
"""The stream, and behind it the outputs that are still to be added, the oldest first."""

Join = Callable[[Tensor], Late]
"""Starts the sum of a rank's share of an output over all ranks."""

_SITES = (ATTENTION, FEED_FORWARD)


def _there(late: Late) -> Tensor:
    return late if isinstance(late, Tensor) else late()


def wired(
    block: TransformerBlock,
    state: State,
    attend: Callable[[Tensor], Late],
    feed: Callable[[Tensor], Late],
    drop: Drop | None,
) -> State:
    """One block of a model with ladder residual.

    Args:
        block: its norms, its number, and whether it reads late.
        state: of the block before; the embedding alone before the first.
        attend: attention of normalised states.
        feed: feed-forward of normalised states.
        drop: dropout of these tokens, of each output by the sub-layer that made it.
    """
    stream, *waiting = (state,) if isinstance(state, Tensor) else state
    x = _there(stream)
    for place, branch in enumerate((attend, feed)):
        while len(waiting) > block.late:
            layer, site = divmod(2 * block.layer + place - len(waiting), 2)
            output = _there(waiting.pop(0))
            x = x + output if drop is None else drop.add(x, output, layer, _SITES[site])
        waiting.append(branch((block.attention_norm, block.mlp_norm)[place](x)))
    return (x, *waiting)


def settled(state: State, num_layers: int, drop: Drop | None = None) -> Tensor:
    """The stream behind the last block, with all that was still to be added."""
    if isinstance(state, Tensor):
        return state
    stream, *waiting = state
    x = _there(stream)
    for behind in range(len(waiting), 0, -1):
        layer, site = divmod(2 * num_layers - behind, 2)
        output = _there(waiting[-behind])
        x = x + output if drop is None else drop.add(x, output, layer, _SITES[site])
    return x


def through(
    model: Transformer,
    x_ND: Tensor,
    position_N: Tensor,
    mixer: Mixer,
    rows_R: Tensor | None = None,
    join: Join | None = None,
) -> tuple[Tensor, Tensor]:
    """As :meth:`~shoal.model.transformer.Transformer.through`; what is left to add comes last.

    Args:
        model: with ladder residual.
        x_ND: the stream; may change.
        position_N: place of each token in its sequence.
        mixer: keeps the keys and values, and knows what each token sees.
        rows_R: tokens that are needed behind the blocks; all, if not given.
        join: starts the sum of an output over ranks, where these share the model.
    """
    turn = model.turn(position_N, x_ND.dtype)
    waiting: list[Late] = []

    def normed(norm: RMSNorm, late: int) -> Tensor:
        nonlocal x_ND
        while len(waiting) > late + 1:
            x_ND, _ = norm.after(x_ND, _there(waiting.pop(0)))
        due = _there(waiting.pop(0)) if len(waiting) > late else None
        x_ND, out = norm.after(x_ND, due)
        return out

    def give(out: Tensor) -> None:
        waiting.append(out if join is None else join(out))

    blocks: list[TransformerBlock] = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks:
        seen = block.attention.flat(normed(block.attention_norm, block.late), turn, mixer)
        if block is blocks[-1] and rows_R is not None:
            waiting = [_there(one)[rows_R] for one in waiting]
            x_ND, seen = x_ND[rows_R], seen[rows_R]
            if not len(rows_R):
                return x_ND, x_ND
        give(block.attention.o_proj(seen))
        give(block.mlp(normed(block.mlp_norm, block.late)))
    while len(waiting) > 1:
        # With a norm, whose kernel adds: a step whose operators are all kernels can be recorded.
        x_ND, _ = model.norm.after(x_ND, _there(waiting.pop(0)))
    return x_ND, _there(waiting[0])
