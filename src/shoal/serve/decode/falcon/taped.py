"""Passes of Falcon's net, recorded once for each number of sequences and places.

As :mod:`shoal.serve.decode.captured`, with what the LSTM does in front of the block: few rows
take so little time that asking the kernels one by one takes longer.

Shapes: as :mod:`shoal.serve.decode.falcon.fast`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.ir import MAX_NODES
from shoal.kernel.protocols import Ready
from shoal.kernel.rnn.cell import copied, native
from shoal.kernel.tape import Tape, record
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import Recording, Recordings
from shoal.serve.decode.falcon.fast import FalconInput, FalconOutput, FalconState, FastFalcon

_Key = tuple[int, int, int, int]


class _Pass(NamedTuple):
    """A recorded pass: what it reads and gives, in memory that stays."""

    rows: Recording
    x: Tensor
    state: FalconState
    outputs: Tensor
    made: FalconOutput
    tape: Tape


class TapedFalcon:
    """Passes of the net over its cache, all sequences of which have as many places.

    Args:
        attention: kernel of ``paged_attention`` that reads trees.
        longest: largest number of tokens of a request, draft tokens included.

    Attributes:
        recorded: by branches, sequences, places and places read once more; None for those that
            were computed once.
        refused: why one is not recorded.
    """

    def __init__(self, net: FastFalcon, cache: PagedCache, attention: Ready, longest: int) -> None:
        self._net, self._cache = net, cache
        self._steps = Recordings(net.shell, cache, attention, longest)
        self._width = -(-longest // cache.block_size)
        self.recorded: dict[_Key, _Pass | None] = {}
        self.refused: dict[_Key, str] = {}

    def read(self, reading: FalconInput) -> FalconOutput:
        """A pass; what it makes may lie in memory that the next one of its kind writes."""
        sequences, places, _ = reading.x.shape
        before = 0 if reading.earlier is None else reading.earlier.shape[1]
        key = (len(reading.branches), sequences, places, before)
        rows = sequences * (before + places)
        unlike = not places or reading.lengths[-1] < places or rows > MAX_NODES
        if unlike or key in self.refused:
            return self._net.read(reading, self._cache)
        if key not in self.recorded:
            # The first pass of a kind may prepare kernels, which must not be repeated.
            self.recorded[key] = None
            return self._net.read(reading, self._cache)
        known = self.recorded[key]
        if known is None:
            return self._record(key, reading)
        self._steps.write(known.rows, reading.branches)
        _fill(known, reading)
        if known.tape.play():
            return known.made
        return self._net.read(reading, self._cache)

    def _record(self, key: _Key, reading: FalconInput) -> FalconOutput:
        """Compute a pass, and keep what was asked if that gives the same again."""
        net = self._net
        requests, sequences, places, before = key
        rows = sequences * (before + places)
        recording = Recording(requests, rows, self._width, net.weight)
        width = net.weight.shape[1]
        outputs = net.weight.new_zeros(sequences, before + places, width)
        x_ETX, begun = reading.x.clone(), FalconState(*(one.clone() for one in reading.state))
        if reading.earlier is not None:
            outputs[:, :before] = reading.earlier
        self._steps.write(recording, reading.branches)
        mixer = self._steps.mixer(recording, False)
        caught: list[tuple[Tensor, FalconState]] = []

        def compute() -> Tensor:
            state = net.mixed(x_ETX, begun, [places] * sequences, outputs[:, before:])
            copied(outputs, recording.x_ND)
            features = net.block(recording.x_ND, recording.fed[1], mixer)
            caught[:] = [(features, state)]
            return net.logits(features)

        logits, tape = record(compute)
        features, state = caught[0]
        made = FalconOutput(
            features.view(sequences, before + places, width)[:, -net.k :],
            logits.view(sequences, before + places, -1)[:, -net.k :],
            outputs,
            state,
        )
        if isinstance(tape, str):
            self.refused[key] = tape
            return made
        computed = [one.clone() for one in (features, logits, *state)]
        again = tape.play()
        if again and all(map(torch.equal, computed, (features, logits, *state))):
            self.recorded[key] = _Pass(recording, x_ETX, begun, outputs, made, tape)
        else:
            self.refused[key] = "a kernel that is not seen"
        return made


def _fill(known: _Pass, reading: FalconInput) -> None:
    known.x.copy_(reading.x)
    known.state.h.copy_(reading.state.h)
    known.state.c.copy_(reading.state.c)
    if reading.earlier is not None:
        known.outputs[:, : reading.earlier.shape[1]].copy_(reading.earlier)


def recorded(
    net: FastFalcon, cache: PagedCache, attention: Ready | None, longest: int
) -> TapedFalcon | None:
    """Recorded passes, where this machine has kernels that can be recorded."""
    if attention is None or not native(net.weight.dtype, net.weight.device):
        return None
    return TapedFalcon(net, cache, attention, longest)
