"""The guide: which steps a table needs, each with the measurement and the rule that led to it.

The rules are the steps' own: each part of the table ``preparation`` that has ``candidates`` looks
at the profile and proposes itself. The guide asks them in the order of the table.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from shoal.core.measure import num_cores
from shoal.core.native import cpu_model
from shoal.core.parts import Choice, table
from shoal.fields.data.prepare.batches import batch_of
from shoal.fields.data.prepare.costs import rates_of
from shoal.fields.data.prepare.profile import TableProfile, profile_of, sketch_profile
from shoal.fields.data.prepare.protocols import PrepareWork, Reason
from shoal.fields.data.prepare.texts import UNITS
from shoal.ir import Device, Machine, MemoryTier

# Association with the target from which on a column is suspected to be made of it.
_LEAK = 0.999
# Share of the memory in which the prepared table is to be analysed.
_ANALYSIS = 0.25


def guide(work: PrepareWork, machine: Machine) -> list[tuple[Choice, Reason]]:
    """The steps that the parts propose, in order."""
    offered = table("preparation").offered(work, machine)
    # As they are read back from a file: lists, not tuples.
    return [(Choice.model_validate_json(one.model_dump_json()), why) for one, why in offered]


def work_of(profile: TableProfile, target: str, machine: Machine, seed: int = 1) -> PrepareWork:
    """What the rules read."""
    capacity = machine.device.main_memory.capacity_bytes or 2**60
    return PrepareWork(
        profile=profile,
        target=target,
        memory=_ANALYSIS * capacity,
        rates=rates_of(machine),
        seed=seed,
    )


def warnings(profile: TableProfile, target: str) -> list[str]:
    """What a reader should look at before anything is prepared."""
    found = []
    for one in profile.columns:
        if one.association > _LEAK and one.name != target:
            found.append(
                f"{one.name}: association {one.association:.5f} with {target}, beyond {_LEAK}: is "
                "it made of the target? if so, drop it with the step drop_columns"
            )
        if one.name != target and one.is_number and 0 < one.numeric < 1:
            found.append(
                f"{one.name}: mixed types, {100 * (1 - one.numeric):.2g} % of its texts are no "
                "numbers and become missing"
            )
        unknown = [unit for unit in one.units if one.is_number and unit not in UNITS]
        if unknown:
            found.append(
                f"{one.name}: unknown units {', '.join(unknown[:5])} are left out of account"
            )
    return found


def guide_table(rows: Any, target: str = "") -> list[tuple[Choice, Reason]]:
    """The steps for a table in memory, on this machine.

    Args:
        rows: table of Arrow with the training rows.
        target: column that is to be predicted; empty for none.

    Examples:
        >>> import pyarrow as pa
        >>> for step, reason in guide_table(pa.table({"x": [1.0, 2.0, None], "k": ["a"] * 3})):
        ...     print(step.name, "because", reason.measured)
        drop_columns because k: one value only
        impute because x: 33.3 % missing
        scale because x: skew 0.00
    """
    places = np.arange(rows.num_rows, dtype=np.int64)
    profile = profile_of(sketch_profile(batch_of(rows, places, target)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = Device(
        name=cpu_model(),
        kind="cpu",
        num_cores=num_cores(),
        memory=(MemoryTier(name="dram", capacity_bytes=memory),),
    )
    machine = Machine(name="here", device=device, fingerprint={"cpu": cpu_model()})
    return guide(work_of(profile, target, machine), machine)
