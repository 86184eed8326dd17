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

from typing import TYPE_CHECKING, cast

from shoal.ir import weight_formats

if TYPE_CHECKING:
    from shoal.kernel.formats.base import BaseFormat

__all__ = ["weight_format"]


def weight_format(text: str) -> BaseFormat:
    """The weight format that a text names.

    Raises:
        KernelError: no such format, width or group; the message says what there is.
    """
    return cast("BaseFormat", weight_formats.weight_format(text))
