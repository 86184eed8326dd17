"""What signatures and queries cost: the rates of a machine.

Rates are timed here in about a second, and kept in ``communities.json`` of Shoal's home for this
processor; a machine that is only described is taken to have such cores, by their peak rate.
"""

from __future__ import annotations

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.minhash import Bands, MinHasher
from shoal.fields.graph.communities.building import SignatureBuilder
from shoal.fields.graph.communities.native import band_mates, equal_slots
from shoal.fields.graph.communities.protocols import CommunityRates
from shoal.fields.graph.communities.signature_graph import SignatureGraph
from shoal.fields.rates import least_seconds, machine_rates, timed_call
from shoal.ir import Machine

# FLOP/s in fp32 of the core whose rates are below: one of Intel's Sapphire Rapids.
_FLOPS = 1.2e11
_THERE = CommunityRates(
    hash_s=8e-11,
    byte_s=1.5e-9,
    sort_s=4e-8,
    slot_s=6e-11,
    mate_s=6e-7,
    step_s=5e-5,
    solve_s=1e-10,
    spread=2.0,
)
_SPREAD = 0.8
_VERTICES, _HASHES, _BANDS, _SEEDS, _NODES = 20_000, 256, 32, 5, 256


def rates_of(machine: Machine) -> CommunityRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return machine_rates(machine, "communities.json", _THERE, timed, _FLOPS)


def timed() -> CommunityRates:
    """Time hashing, sorting, comparing and looking up on this machine."""
    draw = generator(0, purpose="rates of communities")
    hasher = MinHasher(_HASHES)
    members = draw.integers(0, 2**32, 200_000, np.uint64)
    rows, none = np.arange(_VERTICES), np.zeros(0, np.int64)
    fresh = SignatureBuilder(_HASHES)
    ends = np.zeros(_VERTICES + 1, np.int64)
    put_s, _ = timed_call(lambda: fresh.put(rows, ends, none))
    few = np.full((100, _HASHES), 2**32 - 1, np.uint32)
    hash_s, _ = least_seconds(lambda: hasher.lower(few, members, np.arange(101) * 2000))
    signatures = draw.integers(0, 2**32, (_VERTICES, _HASHES), np.uint32)
    ids, degrees = np.arange(_VERTICES), np.ones(_VERTICES, np.int64)
    cut = Bands(_BANDS, 2)
    sort_s, graph = least_seconds(lambda: SignatureGraph(ids, signatures, degrees, cut=cut))
    seeds, others = ids[:_SEEDS], draw.permutation(ids)[:4096]
    slot_s, _ = least_seconds(lambda: equal_slots(signatures, seeds, others))
    keys = np.ascontiguousarray(graph.bands[:, draw.permutation(ids)[:_SEEDS]])
    mate_s, _ = least_seconds(lambda: band_mates(graph.bands, keys))
    matrix = draw.random((_NODES, _NODES)) + _NODES * np.eye(_NODES)
    solve_s, _ = least_seconds(lambda: np.linalg.solve(matrix, matrix[0]))
    scores = draw.random(4096)
    step_s, _ = least_seconds(lambda: np.argsort(-scores, kind="stable"))
    return CommunityRates(
        hash_s=hash_s / (len(members) * _HASHES),
        byte_s=put_s / (4 * _HASHES * _VERTICES),
        sort_s=sort_s / (_VERTICES * _BANDS),
        slot_s=slot_s / (_SEEDS * len(others) * _HASHES),
        mate_s=mate_s / (_BANDS * _SEEDS),
        step_s=step_s,
        solve_s=3 * solve_s / _NODES**3,
        spread=_SPREAD,
    )
