"""``shoal explain mapping``: what of a program should be in fast memory, when, and where?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.config import Kind
from shoal.core.errors import MissingExtraError
from shoal.core.parts import Choice, part
from shoal.core.sizes import Size, human_bytes
from shoal.core.tables import Table, digits
from shoal.ir import Explanation, Machine, Progress
from shoal.memory.mapping import MAPPERS
from shoal.plan.mapping.layout import ACTIONS, Mapping
from shoal.plan.mapping.picture import picture
from shoal.plan.mapping.program import TICK_S, MappingProgram, TierSpec
from shoal.plan.mapping.samples import random_program, strassen

_ROWS = 16
_SHADES = " ░▒▓█"


@part
class MappingStudy:
    """Map the buffers of a program to a small fast memory: copies, times and addresses.

    The time is modelled; `greedy`, as in compilers, is shown for comparison.

    **Examples**

        shoal explain mapping shoal-1m --fast 4MiB --mapper hybrid --picture mapping.svg

        shoal explain mapping resnet --fast 512KiB --mapper '{name: anneal, rounds: 5000}'

        shoal explain mapping program.yaml --fast 64KiB --mapper milp -o json

    Args:
        model: a model's name, a sample such as resnet, or a program in YAML.
        fast: size of the fast memory, such as 4MiB.
        mapper: a part of kind mapper.
        length: tokens of the model's input.
        fast_bandwidth: byte/s of the fast memory; ten times the slow one if not given.
        slow_bandwidth: byte/s of the slow memory; of the machine, or 20e9.
        flops: FLOP/s of products; of the machine, or 1e12.
        fit: allocation of buffers: first (fit) or best (fit).
        times: time of operators: by a model, or measured on this machine.
        seed: seed of all random choices.
    """

    subject: ClassVar = "model"
    machine: ClassVar = ""

    model: str = "shoal-1m"
    fast: Size = 4 << 20
    mapper: Annotated[Choice, Kind("mapper")] = Choice(name="hybrid")
    length: Annotated[int, Ge(1)] = 64
    fast_bandwidth: float | None = None
    slow_bandwidth: float | None = None
    flops: Annotated[float, Gt(0)] | None = None
    fit: str = "first"
    times: Literal["model", "measured"] = "model"
    seed: int = 0

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """The map and its modelled time, beside the compiler's way if that is another."""
        slow, flops = self.slow_bandwidth, self.flops
        if machine is not None:
            device = machine.device
            slow = slow or device.main_memory.read_bandwidth
            flops = flops or max(device.matmul_flops.values(), default=None)
        slow = 20e9 if slow is None else slow
        tiers = TierSpec(
            fast_bytes=self.fast,
            slow_bandwidth=slow,
            fast_bandwidth=10 * slow if self.fast_bandwidth is None else self.fast_bandwidth,
            fit=self.fit,
        )
        program = self._program(1e12 if flops is None else flops)
        choices = list(dict.fromkeys([self.mapper, Choice(name="greedy")]))
        results = []
        for index, choice in enumerate(choices):
            progress(index, len(choices), choice.name)
            results.append(MAPPERS.build(choice).map(program, tiers, seed=self.seed))
        return Explanation(
            blocks=tuple(_blocks(results)),
            data=_record(results),
            picture=lambda: picture(results[0]),
            files={
                "program.yaml": lambda: program.as_yaml(
                    "A program of memory, by `shoal explain mapping`."
                )
            },
        )

    def _program(self, flops: float) -> MappingProgram:
        """The program of a model, a sample or a file.

        Raises:
            ModelError: no such model.
            PlanError: a file that is no program.
            MissingExtraError: tracing needs torch.
        """
        if self.model.endswith((".yaml", ".yml")):
            return MappingProgram.load(Path(self.model))
        if self.model == "strassen":
            return strassen(matmul_flops=flops, vector_flops=flops / 10)
        if self.model.startswith("random") and self.model[6:].isdigit():
            return random_program(seed=int(self.model[6:]))
        try:
            return _traced(self.model, flops, self.length, self.times)
        except ModuleNotFoundError as cause:
            if cause.name != "torch":
                raise
            raise MissingExtraError("torch", "run", "tracing a model") from None


def _traced(
    model: str, flops: float, length: int, times: Literal["model", "measured"]
) -> MappingProgram:
    from shoal.memory.mapping.samples import MODELS, sample
    from shoal.memory.mapping.trace import Speed, trace

    speed = Speed(matmul_flops=flops, vector_flops=flops / 10)
    if model in MODELS:
        module, inputs = sample(model)
        return trace(module, inputs, name=model, speed=speed, times=times).program
    import torch

    from shoal.cost.shapes import resolve
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

    config = ModelConfig.from_shape(resolve(model))
    # Weights are only needed where operators run.
    with torch.device("cpu" if times == "measured" else "meta"):
        module = Transformer(config)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return trace(module, (tokens,), name=model, speed=speed, times=times).program


def _record(found: Sequence[Mapping]) -> dict[str, Any]:
    """Everything as JSON has it; the rectangles are those of the first mapping."""
    first = found[0]
    c = first.compiled
    unit = c.tiers.alignment
    return {
        "program": c.program.name,
        "instructions": c.slots,
        "decisions": c.decisions,
        "tiers": c.tiers.model_dump(mode="json"),
        "all_slow_s": c.all_slow * TICK_S,
        "bound_s": c.all_fast * TICK_S,
        "mappers": {one.mapper: one.seconds for one in found},
        "actions": [
            {
                "instruction": c.program.instructions[int(c.slot[k])].name,
                "buffer": c.names[int(c.buffer[k])],
                "action": ACTIONS[action],
            }
            for k, action in enumerate(first.actions)
        ],
        "rectangles": [
            {
                "buffer": c.names[one.buffer],
                "first_slot": one.start,
                "last_slot": one.end,
                "address": one.address * unit,
                "bytes": int(c.size[one.buffer]) * unit,
            }
            for one in first.rectangles
        ],
        "copies": [
            {
                "buffer": c.names[one.buffer],
                "slot": one.slot,
                "seconds": one.ticks * TICK_S,
                "to": "slow" if c.write[one.decision] else "fast",
            }
            for one in first.moved
        ],
        "notes": list(first.notes),
    }


def _sketch(mapping: Mapping, width: int = 72) -> list[str]:
    """Shares of fast memory that are taken, address upwards and instruction across."""
    c = mapping.compiled
    width = min(width, c.slots)
    taken = np.zeros((_ROWS, width))
    edges = np.linspace(0, c.room, _ROWS + 1)
    for column in range(width):
        slot = column * c.slots // width
        for one in mapping.rectangles:
            if one.start <= slot <= one.end:
                top = one.address + int(c.size[one.buffer])
                part = np.minimum(top, edges[1:]) - np.maximum(one.address, edges[:-1])
                taken[:, column] += np.maximum(part, 0) / (c.room / _ROWS)
    shade = np.ceil(np.clip(taken, 0, 1) * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[i] for i in row) for row in shade[::-1]]


def _blocks(found: Sequence[Mapping]) -> list[Table | str]:
    """The times of the mappers, the map, and the buffers that are in fast memory longest."""
    first = found[0]
    c = first.compiled
    rows = [("everything slow", c.all_slow), *((one.mapper, one.ticks) for one in found)]
    rows.append(("everything fast, were there room", c.all_fast))
    longest = sorted(
        first.rectangles, key=lambda one: -int(c.size[one.buffer]) * (one.end - one.start + 1)
    )[:8]
    return [
        f"{c.program.name}: {c.slots} instructions, {c.decisions} decisions, "
        f"{human_bytes(c.tiers.fast_bytes)} of fast memory",
        Table(
            title="modelled time",
            columns=("mapper", "us", "of all slow"),
            rows=tuple(
                (name, digits(1e6 * TICK_S * ticks), f"{100 * ticks / c.all_slow:.1f} %")
                for name, ticks in rows
            ),
            right=" rr",
        ),
        "fast memory, addresses upwards, instructions across",
        *(f"|{line}|" for line in _sketch(first)),
        Table(
            title="largest stays",
            columns=("buffer", "bytes", "address", "from", "to", "how"),
            rows=tuple(
                (
                    c.names[one.buffer],
                    str(int(c.size[one.buffer]) * c.tiers.alignment),
                    str(one.address * c.tiers.alignment),
                    c.program.instructions[one.start].name,
                    c.program.instructions[one.end].name,
                    "made there" if c.write[one.decision] else "copied",
                )
                for one in longest
            ),
            right=" rr",
        ),
        *(f"note: {note}" for note in first.notes),
    ]
