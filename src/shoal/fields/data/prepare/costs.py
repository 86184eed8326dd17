"""What preparation costs: the rates of a machine."""

from __future__ import annotations

import io

import numpy as np

from shoal.core.native import cpu_model
from shoal.core.random import generator
from shoal.fields.data.prepare.protocols import PrepareRates
from shoal.fields.data.prepare.sketches import Moments, TDigest
from shoal.fields.data.prepare.texts import folded, parsed
from shoal.fields.data.readers import arrow
from shoal.fields.rates import core_share, kept_rates, least_seconds
from shoal.ir import Machine

# Of one core at 83 GFLOP/s, single precision; others by that.
_KNOWN = 83e9
_CORE = {"byte_s": 2e-9, "scan_s": 2e-9, "sort_s": 6e-8, "text_s": 4e-7, "write_s": 2e-8}
_VALUES = 2**18


def rates_of(machine: Machine) -> PrepareRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return kept_rates("prepare.json", cpu_model(), PrepareRates, timed)
    share = core_share(machine, _KNOWN)
    return PrepareRates(**{name: one / share for name, one in _CORE.items()}, measured=False)


def timed() -> PrepareRates:
    """Time the passes on this machine, for about half a second."""
    random, pa, parquet = generator(0, purpose="prepare rates"), arrow(), arrow("parquet")
    values = random.standard_normal(_VALUES)
    texts = pa.array([f"{one:.4f} m" for one in values[: _VALUES // 8]], pa.large_string())
    table, file = pa.table({"x": values}), io.BytesIO()

    def write() -> None:
        file.seek(0)
        parquet.write_table(table, file, compression="zstd")

    def read() -> None:
        file.seek(0)
        parquet.read_table(file, use_threads=False)

    write_s, _ = least_seconds(write)
    read_s, _ = least_seconds(read)
    scan_s, _ = least_seconds(lambda: Moments.of(values[:, None]))
    sort_s, _ = least_seconds(lambda: [TDigest.of(one) for one in np.split(values, 4)])
    text_s, _ = least_seconds(lambda: (parsed(texts), folded(texts), texts.to_pylist()))
    return PrepareRates(
        byte_s=read_s / file.tell(),
        scan_s=scan_s / _VALUES / 4,  # a sketch of moments goes over them about four times
        sort_s=sort_s / _VALUES,
        text_s=text_s / len(texts) / 3,
        write_s=write_s / _VALUES,
        measured=True,
    )
