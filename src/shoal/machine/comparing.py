"""Two machines side by side."""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.config import Value
from shoal.ir.machine import Machine


class MachineDifference(Value):
    """One number of two machines.

    Args:
        quantity: dotted field, such as ``device.matmul_flops.bf16``.
        a: the first machine's, None if it has none.
        b: the second one's.
        ratio: b / a, None unless both are there.
    """

    quantity: str
    a: float | None
    b: float | None
    ratio: float | None


class DifferenceRow(NamedTuple):
    """One difference as people read it; absent numbers are empty."""

    quantity: str
    a: str
    b: str
    ratio: str


def compare(a: Machine, b: Machine) -> list[DifferenceRow]:
    """The table of :func:`differences`, every number with its unit."""
    return [
        DifferenceRow(
            found.quantity,
            _text(found.quantity, found.a),
            _text(found.quantity, found.b),
            "" if found.ratio is None else f"{found.ratio:.3g}x",
        )
        for found in differences(a, b)
    ]


def _text(quantity: str, number: float | None) -> str:
    if number is None:
        return ""
    last = quantity.rsplit(".", 1)[-1]
    if last.endswith("_s"):
        for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if number >= scale:
                return f"{number / scale:.3g} {unit}"
        return f"{number / 1e-9:.3g} ns"
    unit = ""
    if "flops" in quantity:
        unit = "FLOP/s"
    elif last.endswith("bandwidth"):
        unit = "B/s"
    elif last.endswith("_bytes"):
        unit = "B"
    if not unit:
        return f"{number:g}"
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}"


def differences(a: Machine, b: Machine) -> list[MachineDifference]:
    """All numbers of two machines, in the order of the description."""
    left, right = _numbers(a), _numbers(b)
    differences = []
    for quantity in dict.fromkeys([*left, *right]):
        x, y = left.get(quantity), right.get(quantity)
        ratio = y / x if x and y is not None else None
        differences.append(MachineDifference(quantity=quantity, a=x, b=y, ratio=ratio))
    return differences


def _numbers(machine: Machine) -> dict[str, float]:
    numbers: dict[str, float] = {
        "nodes": machine.nodes,
        "devices_per_node": machine.devices_per_node,
    }
    device = machine.device
    if device.num_cores:
        numbers["device.num_cores"] = device.num_cores
    for group in ("peak_flops", "matmul_flops", "matmul_flops_1core"):
        for dtype, rate in getattr(device, group).items():
            numbers[f"device.{group}.{dtype}"] = rate
    numbers["device.op_overhead_s"] = device.op_overhead_s
    for tier in device.memory:
        # The main memories of a CPU and of a GPU stand in one line.
        name = "main" if tier is device.main_memory else tier.name
        for key in ("capacity_bytes", "read_bandwidth", "write_bandwidth", "latency_s"):
            value = getattr(tier, key)
            if value is not None:
                numbers[f"device.memory.{name}.{key}"] = float(value)
    if device.power_watts:
        numbers["device.power_watts"] = device.power_watts
    for link in machine.links:
        numbers[f"links.{link.scope}.bandwidth"] = link.bandwidth
        numbers[f"links.{link.scope}.latency_s"] = link.latency_s
    if machine.usd_per_device_hour is not None:
        numbers["usd_per_device_hour"] = machine.usd_per_device_hour
    return numbers
