"""The description of a GPU by the name that its driver gives, or of the nearest one."""

from __future__ import annotations

import functools

from shoal.cost.kernels.times import table_of
from shoal.ir import Machine
from shoal.machine.described import load, names
from shoal.machine.shorthand import device_key

# Kernel table -> the description of the device that it was measured on.
_DESCRIBED = {
    "gb300": "GB300",
    "gb200": "GB200",
    "b300_sxm": "B300",
    "b200_sxm": "B200",
    "h200_sxm": "H200",
    "h100_sxm": "H100",
    "rtx_pro_6000_server": "RTX-PRO-6000",
    "l40s": "L40S",
    "a100_sxm": "A100",
}


@functools.cache
def nearest(name: str) -> tuple[Machine, str]:
    """A described machine with such a device, and why it is another's; empty if it is not.

    Args:
        name: as a driver, a data sheet or a shorthand has it.
    """
    key = device_key(name)
    for known in names():
        machine = load(known)
        if key in (device_key(known), device_key(machine.device.name)):
            return machine, ""
    near = _DESCRIBED[table_of(name)]
    return load(near), f"there is no description of {name}: predictions are those of {near}"
