"""Tiles of kernels, as systems of constraints over the facts of a machine.

``tiling`` writes the system of a kernel for a machine, solves it
(:mod:`shoal.plan.constrint.solve`) and gives sizes back. The fused recurrence
(:mod:`shoal.kernel.rnn.fused`) asks it for every new shape; ``shoal explain tiles`` shows what it
says.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024, whose
kernels are tiled by an integer constraint solver.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.native import cpu_flags
from shoal.ir import Machine
from shoal.machine import host
from shoal.plan.constrint.solve import Solution, solve

# Gates with a recurrent product, of each function of :mod:`shoal.kernel.rnn`.
GATES = {"lstm": 4, "gru": 3, "elman": 1, "slstm": 4}

# Bytes of the vectors that the C++ kernels compute with, in one register or in several.
_VECTOR = 64


class Facts(Value):
    """What of a machine bounds a tile.

    Args:
        kind: cpu or gpu.
        cores: cores of a CPU, or multiprocessors of a GPU.
        vector_bytes: of a vector register; on a GPU of the registers of one name in a warp.
        registers: vector registers of a core; on a GPU those that a thread may have.
        l1_bytes: first-level data cache of a core, or shared memory of a multiprocessor.
        l2_bytes: second-level cache of a core, or of a GPU.
    """

    kind: Literal["cpu", "gpu"] = "cpu"
    cores: PositiveInt = 1
    vector_bytes: PositiveInt = 32
    registers: PositiveInt = 16
    l1_bytes: PositiveInt = 32_768
    l2_bytes: PositiveInt = 1_048_576


# What every CUDA GPU since 2018 has at least; memory tiers and cores say more.
_GPU = Facts(
    kind="gpu", cores=80, vector_bytes=128, registers=255, l1_bytes=98_304, l2_bytes=6_291_456
)


class RecurrenceShape(Value):
    """A recurrence, as far as its tiles depend on it.

    Args:
        hidden: units of all heads.
        batch: sequences.
        function: lstm, gru, elman or slstm.
        lanes: numbers that are computed with at once in 64 bytes.
        number_bytes: of a stored number of the recurrent matrix.
    """

    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    batch: PositiveInt = 1
    function: Literal["lstm", "gru", "elman", "slstm"] = "lstm"
    lanes: PositiveInt = 16
    number_bytes: PositiveInt = 4

    @property
    def units(self) -> int:
        """Units of a head.

        Raises:
            ConfigError: the heads do not divide the units.
        """
        require(
            self.hidden % self.heads == 0,
            "recurrence.hidden",
            self.hidden,
            expected=f"a multiple of heads = {self.heads}",
            hint=f"the nearest is {max(1, round(self.hidden / self.heads)) * self.heads}",
        )
        return self.hidden // self.heads


class LinearShape(Value):
    """A product of few rows with a matrix of weights of few bits.

    Args:
        m: rows.
        bits: of a weight.
        group: weights that share a scale; a block of inputs is a multiple of it.
    """

    m: PositiveInt = 1
    n: PositiveInt = 4096
    k: PositiveInt = 4096
    bits: PositiveInt = 4
    group: PositiveInt = 128


@dataclass(frozen=True)
class Tiling:
    """A solved system.

    Args:
        text: the system.
        solution: its best assignment.
        meanings: variable -> what it is, of those that a kernel takes.
    """

    text: str
    solution: Solution
    meanings: dict[str, str]

    def __getitem__(self, name: str) -> int:
        return self.solution[name]


@functools.cache
def here() -> Facts:
    """The CPU of this process."""
    caches, flags, known = host.caches(), cpu_flags(), Facts()
    wide = "avx512f" in flags
    return Facts(
        cores=len(host.cpus()),
        vector_bytes=64 if wide else 32 if "avx2" in flags else 16,
        registers=32 if wide or "asimd" in flags else 16,
        l1_bytes=caches.get("l1d", known.l1_bytes),
        l2_bytes=caches.get("l2", known.l2_bytes),
    )


def facts_of(machine: Machine) -> Facts:
    """What is known of one device of a machine; the least that such devices have otherwise."""
    device = machine.device
    known = _GPU if device.kind == "gpu" else Facts()
    if machine.provenance == "probed" and device.kind == "cpu":
        known = here()
    result = {
        f"{tier.name[:2]}_bytes": tier.capacity_bytes
        for tier in device.memory
        if tier.name in ("l1d", "l2")
    }
    if device.num_cores is not None:
        result["cores"] = device.num_cores
    return known.model_copy(update=result)


def recurrence_system(shape: RecurrenceShape, facts: Facts) -> str:
    """The system of the fused recurrence: C++ on a CPU, as FlashRNN on a GPU."""
    head = f"""\
gates = {GATES[shape.function]}   # with a recurrent product
units = {shape.units}   # of a head
heads = {shape.heads}
batch = {shape.batch}
number = {shape.number_bytes}   # bytes of a number of the recurrent matrix
"""
    return head + (_recurrence_gpu if facts.kind == "gpu" else _recurrence_cpu)(shape, facts)


def _recurrence_cpu(shape: RecurrenceShape, facts: Facts) -> str:
    gates, units = GATES[shape.function], shape.units
    vectors = -(-units // shape.lanes)
    tile = gates if gates > 1 else min(4, vectors)
    work = shape.heads * shape.batch
    return f"""\
lanes = {shape.lanes}   # numbers of a vector
vectors = {vectors}   # of the units of a head
tile = {tile}   # vectors of a tile of the product
parts = {max(1, _VECTOR // facts.vector_bytes)}   # registers of a vector
file = {facts.registers}   # registers of a core
cores = {facts.cores}
room = {facts.l2_bytes * 3 // 4}   # bytes of a core's L2 for the recurrent matrices

rows in {{1, 2, 4, 6}}   # of the batch that a tile has
slices in 1..{shape.batch}   # of the batch
share in 1..{shape.batch}   # rows of a slice
team in 1..{facts.cores}   # threads that share a head
teams in 1..{facts.cores}
own in 1..{vectors}   # vectors of a head that a thread computes
waves in 1..{work}   # heads and slices that a team takes one after the other
together in 1..{work}   # of those, how many go through time together
barrier in {{0, 1}}   # a team of several meets once a step

registers: (rows * tile + tile) * parts + 1 <= file | rows == 1
block: rows <= share
threads: teams * team <= cores
batch_cut: slices * share >= batch; (slices - 1) * share < batch
units_cut: own * team >= vectors; (own - 1) * team < vectors
waves_cut: waves * teams >= heads * slices; (waves - 1) * teams < heads * slices
in_L2: gates * units * own * lanes * number * together <= room
group: together <= waves
meeting: (team == 1; barrier == 0) | (team >= 2; barrier == 1)

# quarters of a cycle of a step, then what else is good
minimize waves * own * gates * units * (2 * share + 3) + 4000 * barrier - together - rows
"""


def _recurrence_gpu(shape: RecurrenceShape, facts: Facts) -> str:
    return f"""\
multiprocessors = {facts.cores}
shared = {facts.l1_bytes}   # bytes of shared memory of a multiprocessor
kept = {facts.vector_bytes * (facts.registers * 5 // 8)}   # bytes of a warp's registers for R

batch_tile in {{8, 16, 32}}   # rows of the batch of a block
batch_blocks in 1..{max(1, -(-shape.batch // 8))}
gate_tile in 16..{max(16, GATES[shape.function] * shape.units)} % 16   # outputs of a warp
gate_warps in 1..32 primes {{2, 3}}
gate_blocks in 1..{facts.cores}   # blocks that share a head; a grid barrier if several
rec_tile in 16..{max(16, shape.units)} % 16   # inputs of a warp
rec_warps in 1..32 primes {{2, 3}}

gates_cut: gate_tile * gate_warps * gate_blocks == gates * units
inputs_cut: rec_tile * rec_warps == units
batch_cut: batch_tile * batch_blocks >= batch; batch_tile * (batch_blocks - 1) < batch
warps: gate_warps * rec_warps <= 32
resident: gate_blocks * batch_blocks * heads <= multiprocessors * 2
in_registers: gate_tile * rec_tile * number <= kept
sums: batch_tile * gate_tile * gate_warps * rec_warps * 4 <= shared

# few blocks a head, many warps
minimize 1024 * gate_blocks - gate_warps * rec_warps * 8 + batch_tile
"""


_RECURRENCE_MEANINGS = {
    "cpu": {
        "rows": "rows of the batch in a register tile",
        "slices": "slices of the batch",
        "team": "threads that share a head",
        "together": "heads that go through time together",
        "own": "vectors of a head that a thread computes",
        "waves": "heads and slices of a team",
    },
    "gpu": {
        "batch_tile": "rows of the batch of a block",
        "gate_tile": "outputs of a warp",
        "rec_tile": "inputs of a warp",
        "gate_warps": "warps along the outputs",
        "rec_warps": "warps along the inputs",
        "gate_blocks": "blocks that share a head",
    },
}


def linear_system(shape: LinearShape, facts: Facts) -> str:
    """The system of a product of few rows with weights of few bits, on a CPU."""
    require(
        facts.kind == "cpu",
        "tiles linear",
        facts.kind,
        expected="the machine of a CPU",
        hint="use --machine local",
    )
    lanes = _VECTOR // 4
    return f"""\
m = {shape.m}
n = {shape.n}
k = {shape.k}
bits = {shape.bits}   # of a weight
group = {shape.group}   # weights that share a scale
lanes = {lanes}
parts = {max(1, _VECTOR // facts.vector_bytes)}   # registers of a vector
file = {facts.registers}   # registers of a core
cores = {facts.cores}
near = {facts.l1_bytes // 2}   # bytes of L1 for a block

rows in 1..{min(shape.m, 8)}   # of x in a register tile
outputs in 1..{min(shape.n, 16)}   # of the weights in a register tile
depth in 1..{shape.k}   # inputs of a block
threads in 1..{facts.cores}

registers: (rows * outputs + outputs + rows) * parts <= file | rows == 1
outputs_cut: n % (outputs * threads) == 0
block: k % depth == 0
scales: depth % group == 0 | depth == k
lanes_cut: depth % lanes == 0 | depth == k
in_L1: outputs * depth * bits + rows * depth * 32 <= near * 8

maximize 1000000 * threads + 10000 * rows * outputs + depth
"""


_LINEAR_MEANINGS = {
    "rows": "rows of x in a register tile",
    "outputs": "outputs in a register tile",
    "depth": "inputs of a block",
    "threads": "threads that share the outputs evenly",
}


@functools.lru_cache(maxsize=1024)
def tiling(shape: RecurrenceShape | LinearShape, facts: Facts) -> Tiling:
    """The best tiles of a kernel.

    Raises:
        UnsatisfiableError: no tiles are possible; names the constraints that conflict.
    """
    if isinstance(shape, LinearShape):
        text, meanings = linear_system(shape, facts), _LINEAR_MEANINGS
    else:
        text, meanings = recurrence_system(shape, facts), _RECURRENCE_MEANINGS[facts.kind]
    return Tiling(text, solve(text), dict(meanings))
