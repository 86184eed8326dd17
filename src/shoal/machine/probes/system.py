"""What the operating system charges: hand-overs, faults, processes, copies and files.

Source: McVoy and Staelin, lmbench: Portable Tools for Performance Analysis, 1996.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError, require
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.native import library
from shoal.machine.protocols import ProbeContext


@part
class SystemProbe:
    """Core to core, thread wake, page fault, process launch, memcpy, file read and write.

    Args:
        file_bytes: size of the file of the disk tests; 0 for 32 MiB (fast) or 256 MiB.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    file_bytes: int = 0
    repeats: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        require(
            self.file_bytes == 0 or self.file_bytes >= 2**20,
            "probe.system.file_bytes",
            self.file_bytes,
            expected="0, or at least 1048576",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Seconds: ``core_to_core``, ``thread_wake``, ``page_fault``, ``process_launch``.

        Also ``disk_fsync`` (s of one small durable write); byte/s: ``memcpy``,
        ``file_read_cold``, ``file_read_warm`` and ``disk_write`` with its fsync.
        """
        repeats = self.repeats or (5 if context.fast else 15)
        system = library("system")
        measurements: list[Measurement] = []

        def add(
            quantity: str, unit: str, call: Callable[[], float], at: float | None = None
        ) -> None:
            values = []
            for _ in range(repeats):
                value = float(call())
                if value <= 0:
                    code = int(-value) if value <= -2 else 0
                    reason = os.strerror(code) if code else "the system refuses it"
                    context.skip(f"system.{quantity}", reason)
                    return
                values.append(value)
            measurements.append(context.measured("system", quantity, unit, values, at=at))

        if len(context.cpus) > 1:
            a, b = context.cpus[0], context.cpus[-1]
            add("core_to_core", "s", lambda: system.system_ping_pong(a, b, 5000, 0))
            add("thread_wake", "s", lambda: system.system_ping_pong(a, b, 2000, 1))
        else:
            context.skip("system.core_to_core", "one core")
            one = context.cpus[0]
            add("thread_wake", "s", lambda: system.system_ping_pong(one, one, 2000, 1))
        add("page_fault", "s", lambda: system.system_page_fault(2000))
        program = shutil.which("true")
        if program is None:
            context.skip("system.process_launch", "no program 'true' to start")
        else:
            name = program.encode()
            add("process_launch", "s", lambda: system.system_launch(name, 10))
        for size in (2**14, 2**20, 2**26):
            times = max(1, 2**27 // size)
            add(
                "memcpy",
                "B/s",
                lambda size=size, times=times: system.system_memcpy(size, times),  # type: ignore[misc]
                at=size,
            )
        self._files(context, add)
        return measurements

    def _files(self, context: ProbeContext, add: Callable[..., None]) -> None:
        system = library("system")
        size = self.file_bytes or (2**25 if context.fast else 2**28)
        try:
            context.home.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(context.home).free
        except OSError as cause:
            context.skip("system.disk", f"{context.home}: {cause.strerror or cause}")
            return
        if free < 4 * size:
            context.skip("system.disk", f"{context.home}: only {free} bytes are free")
            return
        if size > 0.5 * host.memory_available():
            context.skip("system.disk", f"a file of {size} bytes does not fit the page cache")
            return
        try:
            with scratch_directory("probe", context.home) as place:
                path = str(place / "file").encode()
                add("disk_write", "B/s", lambda: system.system_write(path, size, 2**20), at=size)
                small = str(place / "small").encode()
                add("disk_fsync", "s", lambda: system.system_fsync(small, 3))
                add("file_read_cold", "B/s", lambda: system.system_read(path, 2**20, 1), at=size)
                add("file_read_warm", "B/s", lambda: system.system_read(path, 2**20, 0), at=size)
        except MachineError as cause:
            context.skip("system.disk", str(cause))
        except OSError as cause:
            context.skip("system.disk", f"{context.home}: {cause.strerror or cause}")
