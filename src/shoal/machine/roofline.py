"""The roofline of a machine, as numbers and as a picture.

Source: Williams et al., Roofline: An Insightful Visual Performance Model, 2009.
"""

from __future__ import annotations

import html
import math

from shoal.core.errors import MachineError, require
from shoal.ir.machine import Machine


def _ceiling(machine: Machine, dtype: str) -> float:
    device = machine.device
    rate = device.matmul_flops.get(dtype) or device.peak_flops.get(dtype)
    known = sorted({*device.matmul_flops, *device.peak_flops})
    require(
        rate is not None,
        "roofline dtype",
        dtype,
        expected=f"one of {', '.join(known) or 'nothing: this machine has no rates'}",
        error=MachineError,
    )
    assert rate is not None
    return rate


def _slope(machine: Machine) -> float:
    rate = machine.device.main_memory.read_bandwidth
    require(
        rate is not None,
        f"machine {machine.name}: read_bandwidth of {machine.device.main_memory.name}",
        None,
        expected="a number",
        hint="probe the machine, or add it to the file",
        error=MachineError,
    )
    assert rate is not None
    return rate


def attainable(machine: Machine, intensity: float, dtype: str = "fp32") -> float:
    """FLOP/s at an arithmetic intensity in FLOP/B, from main memory."""
    return min(_ceiling(machine, dtype), intensity * _slope(machine))


def ridge(machine: Machine, dtype: str = "fp32") -> float:
    """FLOP/B above which the arithmetic binds and not the memory."""
    return _ceiling(machine, dtype) / _slope(machine)


_COLORS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#57606a")


def roofline_svg(machine: Machine) -> str:
    """The roofline of every type the machine has a rate for, as a stand-alone SVG.

    Raises:
        MachineError: the machine has no rates, or no bandwidth of its main memory.
    """
    dtypes = [
        d
        for d in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
        if d in machine.device.matmul_flops or d in machine.device.peak_flops
    ]
    require(
        bool(dtypes),
        f"machine {machine.name}: rates",
        dtypes,
        expected="a matmul_flops or peak_flops of some type",
        hint="probe the machine, or add it to the file",
        error=MachineError,
    )
    slope = _slope(machine)
    rates = {dtype: _ceiling(machine, dtype) for dtype in dtypes}
    left, right = -2.0, math.ceil(math.log10(max(rates.values()) / slope)) + 1.0
    top = math.ceil(math.log10(max(rates.values())))
    bottom = math.floor(math.log10(slope * 10**left))
    width, height, margin = 720, 440, 64

    def x(intensity: float) -> float:
        share = (math.log10(intensity) - left) / (right - left)
        return margin + share * (width - 2 * margin)

    def y(rate: float) -> float:
        return (
            height - margin - (math.log10(rate) - bottom) / (top - bottom) * (height - 2 * margin)
        )

    title = html.escape(f"Roofline of {machine.name}: {machine.device.name}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{width / 2}" y="24" text-anchor="middle" font-size="15">{title}</text>',
    ]
    for power in range(int(left), int(right) + 1):
        at = x(10.0**power)
        lines.append(
            f'<line x1="{at:.1f}" y1="{margin}" x2="{at:.1f}" y2="{height - margin}" '
            'stroke="#e0e0e0"/>'
            f'<text x="{at:.1f}" y="{height - margin + 18}" text-anchor="middle">'
            f"{10.0**power:g}</text>"
        )
    for power in range(int(bottom), int(top) + 1):
        at = y(10.0**power)
        lines.append(
            f'<line x1="{margin}" y1="{at:.1f}" x2="{width - margin}" y2="{at:.1f}" '
            'stroke="#e0e0e0"/>'
            f'<text x="{margin - 8}" y="{at + 4:.1f}" text-anchor="end">{_si(10.0**power)}</text>'
        )
    for color, (dtype, rate) in zip(_COLORS * 2, rates.items(), strict=False):
        knee = rate / slope
        points = [(10.0**left, slope * 10.0**left), (knee, rate), (10.0**right, rate)]
        path = " ".join(f"{x(i):.1f},{y(r):.1f}" for i, r in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines.append(
            f'<text x="{width - margin + 4}" y="{y(rate) + 4:.1f}" fill="{color}">{dtype}</text>'
        )
    lines.append(
        f'<text x="{width / 2}" y="{height - 16}" text-anchor="middle">'
        "arithmetic intensity, FLOP/B</text>"
        f'<text transform="rotate(-90 16 {height / 2})" x="16" y="{height / 2}" '
        'text-anchor="middle">FLOP/s</text></svg>'
    )
    return "\n".join(lines) + "\n"


def _si(number: float) -> str:
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:g} {letter}"
    return f"{number:g}"
