"""kv: formats in which the paged cache keeps keys and values; see ``shoal.kernel.KV_FORMATS``.

The text of a format names how numbers are stored and nothing else: ``plain``, ``int8``,
``bfp12-b32``. Nothing here imports torch before it computes.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from shoal.core.errors import KernelError

if TYPE_CHECKING:
    from shoal.kernel.protocols import KVFormat

__all__ = ["kv_format"]


@functools.cache
def kv_format(text: str) -> KVFormat:
    """The format with this text.

    Raises:
        KernelError: no format has it.
    """
    from shoal.kernel.kv.bfp import BfpKVFormat
    from shoal.kernel.kv.int8 import Int8
    from shoal.kernel.kv.plain import Plain

    if text == "plain":
        return Plain()
    if text == "int8":
        return Int8()
    match = re.fullmatch(r"bfp(\d+)-b(\d+)", text)
    if match is None:
        raise KernelError(
            f"cache format {text!r}: expected plain, int8, or block floats such as bfp12-b32 "
            "(bits, then numbers per exponent)"
        )
    return BfpKVFormat(bits=int(match[1]), block=int(match[2]))
