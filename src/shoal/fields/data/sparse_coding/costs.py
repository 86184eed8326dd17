"""What sparse coding costs: the rates of a machine.

Rates are timed here in about half a second, and kept in ``sparse_coding.json`` of Shoal's home for
this processor; for a machine that is only described they follow from its peak rate.
"""

from __future__ import annotations

import numpy as np

from shoal.core.native import cpu_model
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.fields.data.sparse_coding.engine import CodingBlocks
from shoal.fields.data.sparse_coding.models.common import batch_points
from shoal.fields.data.sparse_coding.protocols import CodingRates, Floats, Superposition
from shoal.fields.data.sparse_coding.states import StateSpace
from shoal.fields.rates import kept_rates, least_seconds
from shoal.ir import Machine

# Shares of what a described CPU could do at best that the products reach, and cycles of the rest.
_OF_FLOPS = 0.5
_STATE_CYCLES, _CELL_CYCLES, _SUBSET_CYCLES, _CALL_S = 12.0, 1.0, 700.0, 3e-4
_HERTZ = 3e9
_SPREAD_TIMED, _SPREAD_DERIVED = 0.6, 3.0


def rates_of(machine: Machine) -> CodingRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return kept_rates("sparse_coding.json", cpu_model(), CodingRates, timed)
    cores = max(machine.device.num_cores or 1, 1)
    flops = machine.device.peak_flops.get("fp32", 1e11) / 2 / cores
    if machine.device.kind == "gpu":  # its host is not described; a core of a server
        flops = 2.5e10
    return CodingRates(
        flop_s=1 / (_OF_FLOPS * flops),
        state_s=_STATE_CYCLES / _HERTZ,
        cell_s=_CELL_CYCLES / _HERTZ,
        subset_s=_SUBSET_CYCLES / _HERTZ,
        call_s=_CALL_S,
        spread=_SPREAD_DERIVED,
        measured=False,
    )


def timed(points: int = 2000) -> CodingRates:
    """Time products of matrices, and passes of three models, on this machine.

    Args:
        points: that it is done with.
    """
    draw = generator(0, purpose="sparse coding rates")
    left, right = draw.standard_normal((points, 256)), draw.standard_normal((256, 256))
    seconds, _ = least_seconds(lambda: left @ right)
    flop_s = seconds / (2.0 * left.size * 256)
    space, data = StateSpace(32, 8, 4), np.abs(draw.standard_normal((points, 64)))
    batches = -(-points // batch_points(space))
    call_s = _pass_s("bsc", space, data[:16])
    states = points * space.num_states
    combinations = points * space.num_combinations
    spent = batches * call_s + points * 4.0 * 32 * 64 * flop_s
    state_s = max(_pass_s("bsc", space, data) - spent, 0.1 * spent) / states
    spent += states * state_s
    maximal = max(_pass_s("mca", space, data) - spent, 0.1 * spent)
    slabs = max(_pass_s("gsc", space, data) - spent, 0.1 * spent)
    return CodingRates(
        flop_s=flop_s,
        state_s=state_s,
        cell_s=maximal / (64 * (combinations + 32 * points)),
        subset_s=slabs / combinations,
        call_s=call_s,
        spread=_SPREAD_TIMED,
        measured=True,
    )


def _pass_s(name: str, space: StateSpace, data: Floats) -> float:
    """Seconds of a pass of a model, at its start."""
    model: Superposition = table("superposition").build(name)
    params = model.start(data.mean(0), data.var(0), space.num_components, 0)
    blocks = CodingBlocks(model, space, [data])
    return least_seconds(lambda: blocks.expect(params, 1.0, [None]))[0]
