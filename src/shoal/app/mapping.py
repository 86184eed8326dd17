"""What ``shoal plan mapping`` does and shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from shoal.app.show import WorkBar, console, table
from shoal.core.errors import MissingExtraError, require
from shoal.core.files import parse_yaml
from shoal.core.sizes import bytes_of, human_bytes
from shoal.core.svg import COLOURS
from shoal.memory.mapping import MAPPERS
from shoal.plan.mapping.layout import ACTIONS, Mapping, Rectangle
from shoal.plan.mapping.program import TICK_S, Program, TierSpec

__all__ = ["asked", "compared", "picture", "show", "summary"]

_SAMPLES = ("mlp", "attention", "resnet", "lstm", "vit", "strassen", "random1", "random2")
_ROWS = 16
_SHADES = " ░▒▓█"


def asked(
    model: str,
    *,
    fast: str,
    fast_bandwidth: float | None,
    slow_bandwidth: float | None,
    flops: float | None,
    machine: str | None,
    fit: str,
    length: int,
    times: str,
) -> tuple[Program, TierSpec]:
    """The program of a model, a sample or a file, and the two memories.

    Raises:
        ConfigError: a flag that cannot be used.
        ModelError: no such model.
        PlanError: memories that cannot be, or a file that is no program.
        MissingExtraError: tracing needs torch.
    """
    require(times in ("model", "measured"), "--times", times, expected="model or measured")
    if machine is not None:
        from shoal.machine.described import load

        device = load(machine).device
        slow_bandwidth = slow_bandwidth or device.main_memory.read_bandwidth
        flops = flops or max(device.matmul_flops.values(), default=None)
    slow = 20e9 if slow_bandwidth is None else slow_bandwidth
    tiers = TierSpec(
        fast_bytes=bytes_of(fast),
        slow_bandwidth=slow,
        fast_bandwidth=10 * slow if fast_bandwidth is None else fast_bandwidth,
        fit=fit,
    )
    speed = 1e12 if flops is None else flops
    require(speed > 0, "--flops", speed, expected="above 0")
    if model.endswith((".yaml", ".yml")):
        return Program.load(Path(model)), tiers
    if model == "strassen":
        from shoal.plan.mapping.samples import strassen

        return strassen(matmul_flops=speed, vector_flops=speed / 10), tiers
    if model.startswith("random") and model[6:].isdigit():
        from shoal.plan.mapping.samples import random_program

        return random_program(seed=int(model[6:])), tiers
    try:
        return _traced(model, speed, length, times), tiers
    except ModuleNotFoundError as cause:
        if cause.name != "torch":
            raise
        raise MissingExtraError("torch", "run", "tracing a model") from None


def _traced(model: str, flops: float, length: int, times: Any) -> Program:
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


def compared(
    program: Program, tiers: TierSpec, *, mapper: str, sets: Sequence[str], seed: int
) -> list[Mapping]:
    """What was asked for, and the compiler's way if that is another.

    Raises:
        ConfigError: no such mapper or option.
        PlanError: a mapper that cannot map this program.
    """
    options: dict[str, Any] = {}
    for word in sets:
        name, separator, text = word.partition("=")
        require(bool(name and separator), "--set", word, expected="OPTION=VALUE of the mapper")
        options[name] = parse_yaml(text, where=f"--set {name}")
    names = [mapper] if mapper == "greedy" else [mapper, "greedy"]
    built = [
        MAPPERS.build({"name": name, **(options if name == mapper else {})}, where="--mapper")
        for name in names
    ]
    with WorkBar("mapping") as bar:
        found = []
        for index, (name, one) in enumerate(zip(names, built, strict=True)):
            bar(index, len(names), name)
            found.append(one.map(program, tiers, seed=seed))
    return found


def summary(found: Sequence[Mapping]) -> dict[str, Any]:
    """Everything as plain values; the rectangles are those of the first mapping."""
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


def picture(mapping: Mapping) -> str:
    """Buffers in fast memory as rectangles, modelled time across and addresses upwards, as SVG."""
    c = mapping.compiled
    left, top, width, height = 76, 34, 860, 380
    ends = np.concatenate([[0], np.cumsum(mapping.durations())]) / max(1, mapping.ticks)
    rows = []
    for one in mapping.rectangles:
        x, right = left + width * ends[one.start], left + width * ends[one.end + 1]
        tall = height * int(c.size[one.buffer]) / c.room
        y = top + height * (1 - one.address / c.room) - tall
        name = c.names[one.buffer]
        way = "made" if c.write[one.decision] else "copied"
        rows.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(right - x, 0.5):.1f}" '
            f'height="{max(tall, 0.5):.1f}" fill="{COLOURS[one.buffer % len(COLOURS)]}" '
            f'fill-opacity="{0.75 if way == "made" else 0.45}" stroke="currentColor" '
            f'stroke-width="0.4"><title>{escape(_told(mapping, one, way))}</title></rect>'
        )
        if right - x > 7 * len(name) and tall > 12:
            rows.append(
                f'<text x="{(x + right) / 2:.1f}" y="{y + tall / 2 + 4:.1f}" '
                f'text-anchor="middle" font-size="10">{escape(name)}</text>'
            )
    bottom = top + height
    share = 100.0 * (1 - mapping.ticks / c.all_slow)
    title = (
        f"{c.program.name} by {mapping.mapper}: {1e6 * mapping.seconds:.4g} us, "
        f"{share:.1f} % less than from slow memory alone"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 16} '
            f'{bottom + 44}" width="{left + width + 16}" height="{bottom + 44}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
            f"<title>{escape(title)}</title>",
            "<desc>Buffers in fast memory: time across, addresses upwards. Pale ones were copied "
            "from slow memory.</desc>",
            f'<text x="{left}" y="20" font-weight="600">{escape(title)}</text>',
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
            'stroke="currentColor" stroke-opacity="0.4"/>',
            *rows,
            f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
            f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">'
            f"{human_bytes(c.tiers.fast_bytes)}</text>",
            f'<text x="{left}" y="{bottom + 18}">0</text>',
            f'<text x="{left + width}" y="{bottom + 18}" text-anchor="end">'
            f"{1e6 * mapping.seconds:.4g} us</text>",
            f'<text x="{left + width / 2:.0f}" y="{bottom + 34}" text-anchor="middle">'
            "modelled time</text>",
            "</svg>",
            "",
        ]
    )


def _told(mapping: Mapping, one: Rectangle, way: str) -> str:
    c = mapping.compiled
    steps = c.program.instructions
    return (
        f"{c.names[one.buffer]}, {human_bytes(int(c.size[one.buffer]) * c.tiers.alignment)}, "
        f"{way}: {steps[one.start].name} to {steps[one.end].name}"
    )


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


def show(found: Sequence[Mapping]) -> None:
    """Print the times of the mappers, the map, and the buffers that are in fast memory longest."""
    first = found[0]
    c = first.compiled
    said = console()
    said.print(
        f"{c.program.name}: {c.slots} instructions, {c.decisions} decisions, "
        f"{human_bytes(c.tiers.fast_bytes)} of fast memory",
        markup=False,
    )
    rows = [("everything slow", c.all_slow), *((one.mapper, one.ticks) for one in found)]
    rows.append(("everything fast, were there room", c.all_fast))
    table(
        "modelled time",
        ("mapper", "us", "of all slow"),
        [
            (name, f"{1e6 * TICK_S * ticks:.4g}", f"{100 * ticks / c.all_slow:.1f} %")
            for name, ticks in rows
        ],
        numeric=" rr",
    )
    said.print("fast memory, addresses upwards, instructions across", markup=False)
    for line in _sketch(first):
        said.print(f"|{line}|", markup=False)
    longest = sorted(
        first.rectangles, key=lambda one: -int(c.size[one.buffer]) * (one.end - one.start + 1)
    )[:8]
    table(
        "largest stays",
        ("buffer", "bytes", "address", "from", "to", "how"),
        [
            (
                c.names[one.buffer],
                int(c.size[one.buffer]) * c.tiers.alignment,
                one.address * c.tiers.alignment,
                c.program.instructions[one.start].name,
                c.program.instructions[one.end].name,
                "made there" if c.write[one.decision] else "copied",
            )
            for one in longest
        ],
        numeric=" rr",
    )
    for note in first.notes:
        said.print(f"note: {note}", markup=False)
