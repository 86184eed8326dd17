"""How long blocks of the cache take to host memory and back, from a machine's rates."""

from __future__ import annotations

from shoal.cost.step_cost.roofline import cache_bytes_per_token
from shoal.ir import HostLink, Machine, ModelShape

# B/s of memory copied by a core, where it was not probed; of PCIe 4.0 with 16 lanes, as copies
# of pinned memory reach it.
_CPU_BYTES_PER_S = 4e9
_PCIE_BYTES_PER_S = 2.4e10
# s of any copy: a call, and on a GPU its launch.
_COPY_S = 1e-5


def host_link(machine: Machine, shape: ModelShape, precision: str, block_size: int) -> HostLink:
    """The link between cache and host on one device of a machine.

    On a CPU both lie in the same memory, which is read and written. A GPU is taken to have a
    PCIe link.

    Args:
        machine: the machine.
        shape: the model.
        precision: fp32 or bf16, of the cache.
        block_size: tokens of a block.
    """
    return HostLink(
        copy_s=max(_COPY_S, machine.device.op_overhead_s),
        bytes_per_s=copy_bytes_per_s(machine),
        block_bytes=cache_bytes_per_token(shape, precision) * block_size,
        layers=shape.num_layers,
    )


def copy_bytes_per_s(machine: Machine) -> float:
    """B/s between a device and its host, one way: of memory read and written, or of PCIe."""
    if machine.device.kind != "cpu":
        return _PCIE_BYTES_PER_S
    memory = machine.device.main_memory
    rates = [rate for rate in (memory.read_bandwidth, memory.write_bandwidth) if rate]
    return 1 / sum(1 / rate for rate in rates) if rates else _CPU_BYTES_PER_S
