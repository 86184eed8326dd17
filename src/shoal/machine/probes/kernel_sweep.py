"""A sweep of serving's kernels over grids of sizes, on the GPU of this host.

The grid of every kernel is walked from coarse to fine, so a sweep that ends early has measured all
over it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from shoal.core.errors import MachineError, require
from shoal.machine.probes.gpu import nvml_facts
from shoal.machine.probes.kernel_torch import kernel_bytes
from shoal.machine.protocols import ProbeContext

_SAVE_EVERY_S = 5.0
_REPEATS = 5
# Share of the memory that operands may take.
_FILL = 0.4


class KernelPoint(NamedTuple):
    """A kernel at one place of its grid.

    Args:
        name: of the grid, such as gemm/bf16.
        sizes: along its axes.
        seconds: median of the samples; None where the device cannot.
    """

    name: str
    sizes: tuple[int, ...]
    seconds: float | None


def coarse_to_fine(grids: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[KernelPoint]:
    """Every place of every grid once, all grids at each fineness; not measured yet."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for stride in (8, 4, 2, 1):
        for name, axes in grids.items():
            kept = ([*axis[::stride], axis[-1]] for axis in axes)
            for sizes in itertools.product(*kept):
                if (name, sizes) not in seen:
                    seen.add((name, sizes))
                    yield KernelPoint(name, sizes, None)


def device_facts(context: ProbeContext, device: str = "cuda") -> dict[str, str]:
    """Name, driver and torch of what would be measured, and bytes of its memory.

    Raises:
        MachineError: torch sees no such device.
        MissingExtraError: torch is not installed.
    """
    version = context.worker().call("hello")["version"]
    if device == "cpu":  # what tests measure
        return {"name": "cpu", "driver": "", "torch": version, "memory_bytes": str(2**28)}
    facts = context.worker().call("gpu_facts")
    if facts is None:
        raise MachineError(
            f"probe gpu: torch {version} sees no CUDA device: it measures the card of this "
            "machine; install its driver and a CUDA build of torch, or plan for a described card, "
            "such as -m H100, which needs no probe"
        )
    return {
        "name": str(facts["name"]),
        "driver": str(nvml_facts(context).get("driver", "")),
        "torch": version,
        "memory_bytes": str(facts["memory_bytes"]),
    }


def measured_kernels(
    context: ProbeContext,
    wanted: Sequence[KernelPoint],
    *,
    device: str,
    memory_bytes: float,
    budget_s: float,
    works: Collection[str] = (),
    progress: Callable[[float, float, str], None] | None = None,
) -> Iterator[list[KernelPoint]]:
    """Measure until the budget is over, and hand over what there is every few seconds.

    Args:
        context: with the measuring process.
        wanted: in this order.
        device: of torch.
        memory_bytes: of the device.
        budget_s: seconds.
        works: grids of which kernels were measured before.
        progress: called with (kernels done, kernels in all, what happens now).

    Raises:
        MachineError: the measuring process died.
        ConfigError: no budget.
    """
    require(0 < budget_s <= 86400, "--budget", budget_s, expected="seconds above 0, up to a day")
    fresh: list[KernelPoint] = []
    begin = saved = time.monotonic()
    # Grid -> whether the device has no such kernel.
    known = dict.fromkeys(works, False)
    for done, point in enumerate(wanted):
        answer = {}
        if not known.get(point.name) and kernel_bytes(*point[:2]) <= _FILL * memory_bytes:
            answer = context.worker().call(
                "shoal.machine.probes.kernel_torch:kernel",
                timeout_s=120.0,
                name=point.name,
                sizes=point.sizes,
                device=device,
                repeats=_REPEATS,
                most_s=max(0.05, 2e-4 * budget_s),
            )
        if "refused" in answer:
            # The first kernel of a grid is its smallest: no memory is short there.
            known.setdefault(point.name, True)
            context.skip(f"gpu.{point.name}", str(answer["refused"]))
        elif "seconds" in answer:
            known.setdefault(point.name, False)
        seconds = median(answer["seconds"]) if "seconds" in answer else None
        fresh.append(point._replace(seconds=seconds))
        now = time.monotonic()
        if progress is not None:
            progress(done + 1, len(wanted), point.name)
        if now - saved > _SAVE_EVERY_S or now - begin > budget_s:
            yield fresh
            fresh, saved = [], now
        if now - begin > budget_s:
            return
    yield fresh
