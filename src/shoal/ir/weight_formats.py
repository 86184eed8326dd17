"""Texts that name formats of weights, such as ``int4-g128``: see :mod:`shoal.kernel.formats`."""

from __future__ import annotations

import functools
import re
from typing import Protocol

from shoal.core.errors import KernelError, suggestion
from shoal.core.parts import table

_EXAMPLES = (
    "int4-g128, int4-channel, int4-2:4, uint3-g64, float3_e1m1-g128, bipolar2-g128, bfp8-g32, "
    "nf4-g64, fp8, nvfp4, mxfp4"
)
# What vendors call some of them.
_NAMES = {
    "fp8": "float8_e4m3-channel",
    "nvfp4": "float4_e2m1-g16",
    "mxfp4": "float4_e2m1-g32",
}


class NamedFormat(Protocol):
    """What a plan asks of a format."""

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included, for long rows."""


@functools.lru_cache(maxsize=1024)
def weight_format(text: str) -> NamedFormat:
    """The weight format that a text names, or one of the names of vendors: fp8, nvfp4, mxfp4.

    Raises:
        KernelError: no such format, width or group; the message says what there is.
    """
    parts = table("weight_format")
    text = _NAMES.get(text, text)
    match = re.fullmatch(r"([a-z]+)([0-9_a-z]*)((?:-[a-z0-9:]+)*)", text)
    if match is None or match[1] not in parts:
        raise KernelError(
            f"weight format {text!r}: expected one of {', '.join(parts)} with its bits and what "
            f"shares a scale, such as {_EXAMPLES}"
            + suggestion(text.split("-")[0].rstrip("0123456789"), parts)
        )
    cls = parts.load(match[1])
    options = cls.read(match[2], text)
    half = False
    shared: list[int | None] = []
    for word in match[3].split("-")[1:]:
        if word == "2:4":
            half = True
        elif word == "channel":
            shared.append(None)
        elif re.fullmatch(r"g[1-9]\d{0,8}", word):
            shared.append(int(word[1:]))
        else:
            raise KernelError(
                f"weight format {text!r}: {word!r}: expected g and a number of weights such as "
                "g128, channel, or 2:4"
            )
    if len(shared) > 1 or (half and match[1] != "int"):
        raise KernelError(
            f"weight format {text!r}: expected one of -gN and -channel, and -2:4 with int only"
        )
    options["group"] = shared[0] if shared else (128 if half else None)
    if half:
        options["half"] = True
    made: NamedFormat = parts.build({"name": match[1], **options})
    return made
