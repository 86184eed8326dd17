"""Passes of Dovetail's net, recorded once for each number of rows.

As :mod:`shoal.serve.decode.captured`, with the gate in front of the layers and the choice of
tokens behind them: so few rows take so little time that asking the kernels one by one takes longer.

Shapes: as :mod:`shoal.serve.decode.dovetail.fast`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.ir import MAX_NODES, ServeJob
from shoal.kernel.protocols import Ready
from shoal.kernel.tape import Tape, record
from shoal.model.drafters.fusion import FusionDrafter
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import Recording, Recordings, TreeRows
from shoal.serve.decode.dovetail.fast import FastFusion, PagedFusion, RequestBlocks
from shoal.serve.decode.dovetail.net import NetInput, NetOutput, NetState

_BLOCK = 16


class _Pass(NamedTuple):
    """A recorded pass: what it reads and gives, in memory that stays."""

    rows: Recording
    features: Tensor
    output: NetOutput
    tape: Tape


class TapedFusion(PagedFusion):
    """Passes that are played from the third of as many rows on; see :class:`PagedFusion`.

    Args:
        attention: kernel of ``paged_attention`` that reads trees.
        prompts: the same for prompts.
        count: K.
        longest: most places of a request, trees included.

    Attributes:
        recorded: by rows; None for those that were computed once.
        refused: why one is not recorded.
    """

    def __init__(
        self,
        net: FastFusion,
        cache: PagedCache,
        attention: Ready,
        prompts: Ready | None,
        count: int,
        longest: int,
    ) -> None:
        super().__init__(net, cache, attention, prompts, count)
        self._steps = Recordings(net.shell, cache, attention, longest)
        self._width = -(-longest // cache.block_size)
        self.recorded: dict[int, _Pass | None] = {}
        self.refused: dict[int, str] = {}

    def read(self, held: NetState, rows: NetInput) -> NetOutput:
        assert isinstance(held, RequestBlocks)
        count = len(rows.tokens)
        if count >= MAX_NODES or count in self.refused:
            return super().read(held, rows)
        if count not in self.recorded:
            # The first pass of a kind may prepare kernels, which must not be repeated.
            self.recorded[count] = None
            return super().read(held, rows)
        branch = _branch(held, rows)
        known = self.recorded[count]
        if known is None:
            result = self._record(count, rows.features, branch)
        else:
            self._steps.write(known.rows, (branch,))
            known.features.copy_(rows.features)
            if not known.tape.play():
                return super().read(held, rows)
            result = known.output
        held.length += count
        if not rows.last:
            return result
        return NetOutput(result.features[-1:], result.tokens[-1:], result.values[-1:])

    def _record(self, count: int, features_TD: Tensor, branch: TreeRows) -> NetOutput:
        """Compute a pass, and keep what was asked if that gives the same again."""
        net, recording = self.net, Recording(1, count, self._width, self.like[:, : self.width])
        self._steps.write(recording, (branch,))
        mixer = self._steps.mixer(recording, False)
        given = features_TD.clone(memory_format=torch.contiguous_format)
        tokens = torch.zeros(count, self.count, dtype=torch.int64)
        values = torch.zeros(count, self.count, dtype=torch.float32)

        def compute() -> Tensor:
            made = net.features(given, recording.fed[0], recording.fed[1], mixer)
            net.best(made, tokens, values)
            return made

        out, tape = record(compute)
        net_output = NetOutput(out, tokens.numpy(), values.numpy())
        if isinstance(tape, str):
            self.refused[count] = tape
            return net_output
        computed = [one.clone() for one in (out, tokens, values)]
        if tape.play() and all(map(torch.equal, computed, (out, tokens, values))):
            self.recorded[count] = _Pass(recording, given, net_output, tape)
        else:
            self.refused[count] = "a kernel that is not seen"
        return net_output


def _branch(held: RequestBlocks, rows: NetInput) -> TreeRows:
    """Rows as a recording takes them; those that stand one after the other are a tree too."""
    start, places = held.length, np.asarray(rows.places)
    if rows.seen is None:
        seen = (2 << np.arange(len(places), dtype=np.int64)) - 1
        return TreeRows(rows.tokens, held.blocks, start, start, places - start, seen)
    root = rows.base - 1
    return TreeRows(rows.tokens, held.blocks, start, root, places - root, rows.seen)


def fast_net(
    net: FusionDrafter,
    embed_VD: Tensor,
    head_VD: Tensor,
    job: ServeJob,
    *,
    count: int,
    longest: int,
    weights: str = "plain",
) -> PagedFusion:
    """The net by the kernels of inference, recorded where this machine has kernels for that.

    Args:
        net: trained.
        embed_VD: the target's.
        head_VD: the target's output matrix.
        job: of the target.
        count: guesses behind each place.
        longest: most places of a request, trees included.
        weights: format of the matrices.
    """
    from shoal.serve.engine.build import attention_kernel

    ready = FastFusion(net, embed_VD, head_VD, weights)
    blocks = kept_places(job, longest) // _BLOCK
    cache = PagedCache(ready.shell.config, blocks, _BLOCK, dtype=embed_VD.dtype)
    attention = attention_kernel(job, ready.shell, cache)
    prompts = attention_kernel(job, ready.shell, cache, prompts=True)
    if attention is None:
        return PagedFusion(ready, cache, None, prompts, count)
    return TapedFusion(ready, cache, attention, prompts, count, longest)


def kept_places(job: ServeJob, longest: int) -> int:
    """Places of the shared cache: as many as the target's has, and room for trees.

    Args:
        job: of the target.
        longest: most places of a request, trees included.
    """
    places = (job.kv_tokens or longest) + job.max_running * (MAX_NODES + _BLOCK)
    return -(-max(places, longest) // _BLOCK) * _BLOCK
