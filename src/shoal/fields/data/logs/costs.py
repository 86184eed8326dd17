"""How fast this machine works on logs, and how much work a log is.

Rates are timed here in about half a second, on lines of a made-up log, and kept in ``logs.json`` of
Shoal's home for this processor; for a machine that is only described they are those of one core of
a server.
"""

from __future__ import annotations

from typing import Any

from shoal.core.native import cpu_model
from shoal.core.random import generator
from shoal.fields.data.logs.formats import GENERAL, LogFormat
from shoal.fields.data.logs.protocols import LogRates, LogWork
from shoal.fields.rates import kept_rates, least_seconds
from shoal.ir import Machine

# Bytes and tokens of a line, and share of distinct masked lines, about, where no sample says.
_SERVER = LogRates(
    read_s=1.2e-9,
    mask_s=4e-9,
    tree_s=4e-7,
    python_s=3e-7,
    write_s=1.5e-6,
    pack_s=4e-7,
    spread=3.0,
    measured=False,
)
_SPREAD_TIMED = 1.0
_LINES = 4000


def rates_of(machine: Machine) -> LogRates:
    """How fast a machine is: timed if it is this one, else those of a server's core.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") != cpu_model():
        return _SERVER
    return kept_rates("logs.json", cpu_model(), LogRates, timed)


def timed(lines: int = _LINES) -> LogRates:
    """Time what the job does on this machine.

    Args:
        lines: of the log that it is timed on.
    """
    from shoal.fields.data.logs.events import EventWriter
    from shoal.fields.data.logs.packed.container import packed_block
    from shoal.fields.data.logs.parsers.drain import DrainParser
    from shoal.fields.data.logs.parsers.iplom import IPLoM
    from shoal.fields.data.logs.reading import block_of, masked

    form = LogFormat("timed", "<Date> <Time> <Level>: <Content>")
    text = _made_up(lines)
    read_s, block = least_seconds(lambda: block_of(text, form))
    column = block.field(-1)
    least_seconds(lambda: masked(column, GENERAL), 1)
    mask_s, clean = least_seconds(lambda: masked(column, GENERAL))
    parser = DrainParser()

    def mine() -> Any:
        miner = parser.open()
        return miner.add(clean), miner.finish()

    tree_s, (ids, mined) = least_seconds(mine)
    slow = IPLoM().open()
    python_s, _ = least_seconds(lambda: (slow.add(column), slow.finish()), 1)
    writer = EventWriter(form)
    write_s, _ = least_seconds(lambda: writer.table(block, mined.ids[ids], mined.templates, 0))
    pack_s, _ = least_seconds(lambda: packed_block(text, form), 1)
    tokens = sum(len(line.split()) for line in clean.to_pylist())
    return LogRates(
        read_s=read_s / len(text),
        mask_s=mask_s / len(text) / len(GENERAL),
        tree_s=tree_s / lines,
        # The estimate of that parser takes eight looks at a token.
        python_s=python_s / tokens / 8.0,
        write_s=2.0 * write_s / lines,  # and half of the time is Parquet's
        pack_s=pack_s / len(text),
        spread=_SPREAD_TIMED,
        measured=True,
    )


def work_of(
    head: bytes, num_bytes: float, form: LogFormat, masks: int, machine: Machine
) -> LogWork:
    """What the estimates of parsers read.

    Args:
        head: the first lines of the log.
        num_bytes: of the whole log.
        form: its format.
        masks: how many.
        machine: whose rates.
    """
    lines = max(head.count(b"\n"), 1)
    scale = num_bytes / max(len(head), 1)
    return LogWork(
        num_bytes=num_bytes,
        lines=lines * scale,
        tokens=max(len(head.split()) / lines, 1.0),
        distinct=0.3,
        masks=masks,
        rates=rates_of(machine),
    )


def _made_up(lines: int) -> bytes:
    draw = generator(0, purpose="rates of logs")
    numbers = draw.integers(0, 10**6, size=(lines, 4)).tolist()
    texts = (
        "2024-01-01 10:00:00 INFO: received block blk_{} of size {} from 10.0.{}.7:{}",
        "2024-01-01 10:00:01 WARN: request {} took {} ms, queue {} of {} is full",
        "2024-01-01 10:00:01 INFO: closing /var/lib/app/{}/{} after {} writes and {} reads",
    )
    return "".join(f"{texts[at % 3].format(*row)}\n" for at, row in enumerate(numbers)).encode()
