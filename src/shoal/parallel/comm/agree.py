"""Ranks that were given different settings detect it at start, and report what differs."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm

_LARGEST = 2**20  # bytes of text that a rank sends to show what differs
_MOST_SHOWN = 5


def agree(comm: Comm, what: str, value: object) -> None:
    """Refuse to go on where ranks hold different values; all ranks call it.

    Every rank sends a digest of 32 bytes; the values are sent only if digests differ. A missing
    rank ends the call as in any collective: after the communicator's timeout.

    Args:
        comm: the ranks that must agree.
        what: what the value is, for the error.
        value: plain data: what JSON can say, with keys of text.

    Raises:
        ConfigError: names the ranks and, for values up to 1 MiB of JSON, the differing entries.
    """
    text = json.dumps(value, sort_keys=True, allow_nan=True).encode()
    mine = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    rows = _gathered(comm, mine)
    if all(row == rows[0] for row in rows):
        return
    sides: defaultdict[bytes, list[int]] = defaultdict(list)
    for number, row in zip(comm.ranks, rows, strict=True):
        sides[row].append(number)
    largest = max(int.from_bytes(row[32:], "little") for row in rows)
    if largest > _LARGEST:
        raise ConfigError(_message(what, sides, []))
    texts = dict(zip(rows, _gathered(comm, text.ljust(largest)), strict=True))
    values = [json.loads(texts[side]) for side in sides]
    raise ConfigError(_message(what, sides, _differences(values)))


def _gathered(comm: Comm, data: bytes) -> list[bytes]:
    """What every rank gave, all of one length."""
    import torch

    x = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
    out: Tensor = x.new_empty(comm.world * len(data))
    comm.all_gather(out, x, tag="agree").wait()
    whole = bytes(out.cpu().numpy())
    return [whole[i : i + len(data)] for i in range(0, len(whole), len(data))]


def _message(what: str, sides: Mapping[bytes, list[int]], differing: list[str]) -> str:
    named = " against ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        for ranks in sides.values()
    )
    shown = "; ".join(differing[:_MOST_SHOWN])
    more = len(differing) - _MOST_SHOWN
    detail = f": {shown}{f'; and {more} more' if more > 0 else ''}" if shown else ""
    return f"{what}: ranks disagree, {named}{detail}; give all ranks the same {what}"


def _differences(values: list[Any], path: str = "") -> list[str]:
    """``place: value | value`` of every entry in which the values differ."""
    if all(value == values[0] for value in values):
        return []
    if all(isinstance(value, dict) for value in values):
        keys = sorted({key for value in values for key in value})
        return [
            line
            for key in keys
            for line in _differences(
                [value.get(key) for value in values], f"{path}.{key}" if path else key
            )
        ]
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        return [
            line
            for index, entries in enumerate(zip(*values, strict=True))
            for line in _differences(list(entries), f"{path}[{index}]")
        ]
    shown = " | ".join(json.dumps(value) for value in values)
    return [f"{path}: {shown}" if path else shown]
