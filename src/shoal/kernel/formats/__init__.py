"""Weight formats: how a matrix is stored in few bits, and the text that names each.

A text is a name with its bits, and what shares a scale::

    int4-g128           symmetric integers, a scale for 128 weights along K
    int4-channel        a scale for each output
    int4-2:4            groups of 128, of every four weights two are kept
    uint3-g64           integers with a zero point
    float3_e1m1-g128    sign, exponent and mantissa
    bipolar2-g128       sums of plus and minus powers of two
    bfp8-g32            mantissas that share an exponent
    nf4-g64             16 numbers at the quantiles of a normal distribution

Without what shares a scale, it is the channel.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from shoal.core.errors import KernelError, nearest
from shoal.core.parts import table

if TYPE_CHECKING:
    from shoal.kernel.formats.base import BaseFormat

__all__ = ["weight_format"]

_EXAMPLES = (
    "int4-g128, int4-channel, int4-2:4, uint3-g64, float3_e1m1-g128, bipolar2-g128, bfp8-g32, "
    "nf4-g64"
)


@functools.lru_cache(maxsize=1024)
def weight_format(text: str) -> BaseFormat:
    """The weight format that a text names.

    Raises:
        KernelError: no such format, width or group; the message says what there is.
    """
    parts = table("weight_format")
    match = re.fullmatch(r"([a-z]+)([0-9_a-z]*)((?:-[a-z0-9:]+)*)", text)
    if match is None or match[1] not in parts:
        hint = nearest(text.split("-")[0].rstrip("0123456789"), parts)
        raise KernelError(
            f"weight format {text!r}: expected one of {', '.join(parts)} with its bits and what "
            f"shares a scale, such as {_EXAMPLES}" + (f"; {hint}" if hint else "")
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
    made: BaseFormat = parts.build({"name": match[1], **options})
    return made
