"""The net of Dovetail as its trees ask it: features one place further, and the best tokens there.

:class:`PlainFusion` computes operator by operator on any device and in any precision, and is what
the other ways are compared with.

Shapes: T places, D hidden, W rows whose tokens are wanted, K tokens behind each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.model.attention import KVCache
from shoal.model.drafters.fusion import FusionDrafter


class NetState(Protocol):
    """What a net keeps of one request."""

    length: int
    """Places that it holds; those behind are forgotten when it is set back."""


class NetInput(NamedTuple):
    """What a pass reads.

    Args:
        features: of the target or of the net [T, D].
        tokens: that come behind each.
        places: of the features.
        seen: where these are nodes of a tree, which rows of it each sees, a bit each; None where
            they stand one after the other.
        base: of a tree, the rows of the cache that all see; row 0 is the last of them.
        last: tokens are wanted behind the last row alone.
    """

    features: Tensor
    tokens: Sequence[int]
    places: Sequence[int]
    seen: np.ndarray | None = None
    base: int = 0
    last: bool = False


class NetOutput(NamedTuple):
    """What a pass gives; the next one may overwrite it.

    Args:
        features: one place further [T, D], or of the last row alone.
        tokens: the most probable next tokens of each requested row, best first [W, K].
        values: logs of their probabilities [W, K].
    """

    features: Tensor
    tokens: np.ndarray
    values: np.ndarray


class FusionNet(Protocol):
    """A net and copies of its target's embedding and head."""

    width: int
    """of a feature"""
    like: Tensor
    """of the type and on the device of features"""

    @property
    def nbytes(self) -> int:
        """Bytes of weights and copies, and of a cache that requests share."""

    def hold(self) -> NetState:
        """What is kept of a new request: nothing yet."""

    def reserve(self, held: NetState, places: int) -> bool:
        """Room for so many places of a request; False where others have all there is."""

    def free(self, held: NetState) -> None:
        """A request's room is no longer needed."""

    def read(self, held: NetState, rows: NetInput) -> NetOutput:
        """A pass over more rows of a request, which is longer by them then."""


class PlainFusion:
    """The net as it was trained, over a cache of each request.

    Args:
        embed_VD: the target's.
        head_VD: the target's output matrix.
        count: K.
        room: places of a request.
    """

    def __init__(
        self, net: FusionDrafter, embed_VD: Tensor, head_VD: Tensor, *, count: int, room: int
    ) -> None:
        self._net, self._embed, self._head = net, embed_VD, head_VD
        self._count, self._room = count, room
        self.like, self.width = embed_VD, embed_VD.shape[1]

    @property
    def nbytes(self) -> int:
        parts = {id(one): one for one in (*self._net.parameters(), self._embed, self._head)}
        return sum(one.numel() * one.element_size() for one in parts.values())

    def hold(self) -> KVCache:
        like = self._embed
        return KVCache(self._net.config, 1, self._room, dtype=like.dtype, device=like.device)

    def reserve(self, held: NetState, places: int) -> bool:
        """It has all of it from the beginning."""
        return True

    def free(self, held: NetState) -> None:
        """Its memory goes with it."""

    def read(self, held: NetState, rows: NetInput) -> NetOutput:
        assert isinstance(held, KVCache)
        count, start, mask = len(rows.tokens), held.length, None
        x, _ = self._net.mixed(rows.features[None], self._embed[list(rows.tokens)][None])
        if rows.seen is not None:
            at = np.arange(start + count) - rows.base + 1
            hidden = (at > 0) & ((rows.seen[:, None] >> at.clip(0)) & 1 == 0)
            mask = torch.zeros(count, start + count, dtype=x.dtype)
            mask = mask.masked_fill_(torch.from_numpy(hidden).to(x.device), float("-inf"))
        elif start and count > 1:
            mask = torch.full((count, start + count), float("-inf"), dtype=x.dtype)
            mask = mask.triu_(start + 1)
        out_TD = self._net.seen(x, torch.tensor(list(rows.places)), mask, held)[0]
        wanted_WD = out_TD[-1:] if rows.last else out_TD
        best = F.linear(wanted_WD, self._head).float().log_softmax(-1).topk(self._count)
        return NetOutput(wanted_WD, best.indices.cpu().numpy(), best.values.cpu().numpy())
