"""What gathering costs: the rates of a machine, and what the batches of a graph ask for.

Rates are timed here in a second, and kept in ``gather.json`` of Shoal's home for this processor; a
GPU is taken to have a PCIe link to a host with such cores.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal.core.extras import require_extra
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.fields.graph.gather.protocols import LINE_BYTES, GatherRates, GatherWork
from shoal.fields.graph.loading import planted_graph
from shoal.fields.graph.sample.neighbours import NeighbourSampler, SampledNodes
from shoal.fields.rates import least_seconds, machine_rates
from shoal.ir import Machine

# FLOP/s in fp32 of the core whose rates are below: one of Intel's Sapphire Rapids.
_FLOPS = 1.2e11
_THERE = GatherRates(
    pack_s=7.2e-11, copy_s=4.1e-11, direct_s=1.0e-10, device_s=1.1e-10, call_s=1.3e-4,
    sample_s=3e-8,
    spread=1.0,
)  # fmt: skip
_ROWS, _WIDTH = 40_000, 512


def rates_of(machine: Machine) -> GatherRates:
    """How fast a machine gathers: timed if it is this one, else by its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    rates = machine_rates(machine, "gather.json", _THERE, timed, _FLOPS)
    if machine.device.kind == "cpu":
        return rates
    over_link = 1 / copy_bytes_per_s(machine)
    memory = machine.device.main_memory.read_bandwidth or 1e12
    return rates.model_copy(
        update={"copy_s": over_link, "direct_s": over_link, "device_s": 2 / memory}
    )


def timed() -> GatherRates:
    """Time one core of this machine, with rows that are no longer in its caches."""
    require_extra("torch", purpose="timing gathers")
    import torch

    from shoal.fields.graph.gather.direct import read_rows
    from shoal.fields.graph.gather.table import FeatureTable
    from shoal.kernel.threads import torch_threads

    draw = np.random.default_rng(0)
    values = torch.zeros(_ROWS, _WIDTH) + 1.0
    rows = torch.from_numpy(draw.permutation(_ROWS)[: _ROWS // 4])
    first, second = (torch.zeros(len(rows), _WIDTH) for _ in range(2))
    with torch_threads(1), FeatureTable(values) as table:
        pack, _ = least_seconds(lambda: torch.index_select(values, 0, rows, out=first), 5)
        copy, _ = least_seconds(lambda: second.copy_(first), 5)
        direct, moved = least_seconds(lambda: read_rows(values, rows, first), 5)
        few = rows[:4]
        call, _ = least_seconds(lambda: [table.gather(few).wait() for _ in range(20)])
    graph = planted_graph(20_000)
    sampler = NeighbourSampler(graph, (10, 10))
    seeds = np.arange(0, graph.num_nodes, 40)
    sample, sampled = least_seconds(lambda: sampler.sample(seeds))
    return GatherRates(
        pack_s=pack / first.nbytes,
        copy_s=copy / first.nbytes,
        direct_s=direct / (LINE_BYTES * moved.requests),
        device_s=direct / first.nbytes,
        call_s=call / 20,
        sample_s=sample / sum(len(block.neighbours) for block in sampled.blocks),
        spread=0.5,
    )


def gather_work(
    samples: Iterable[SampledNodes],
    heat: np.ndarray,
    width: int,
    rates: GatherRates,
    host_bytes_per_s: float | None = None,
) -> GatherWork:
    """What a batch gathers, as a mean over some that were drawn.

    Args:
        samples: of batches.
        heat: [N], how hot each node is.
        width: floats of a row.
        rates: of the machine.
        host_bytes_per_s: as of :class:`GatherWork`.
    """
    drawn = [one.nodes for one in samples]
    nodes = np.concatenate(drawn)
    rank = np.empty(len(heat), np.int64)
    rank[np.argsort(-heat, kind="stable")] = np.arange(len(heat))
    # How many of the rows that are asked for are among the hottest so many hundredths.
    part = np.sort(rank[nodes])
    hot = np.searchsorted(part, np.arange(101) * len(heat) / 100) / len(part)
    lines = ((4 * width * nodes) % LINE_BYTES + 4 * width - 1) // LINE_BYTES + 1
    return GatherWork(
        rows=len(nodes) / len(drawn),
        width=width,
        hot=tuple(map(float, hot)),
        line_bytes=float(LINE_BYTES * lines.sum() / len(drawn)),
        table_rows=len(heat),
        rates=rates,
        host_bytes_per_s=host_bytes_per_s,
    )
