"""Multi-head latent attention: what a shape says of its compressed keys and values.

Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from shoal.ir import ModelShape


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: what a shape's heads do not say.

    Args:
        query: rank of the compressed queries; 0 if they are not compressed.
        kv: rank of the compressed keys and values.
        plain: width of a head without positions.
        rotary: width of a head with positions, whose keys all heads share.
        value: width of a head's values.
    """

    query: int
    kv: int
    plain: int
    rotary: int
    value: int


@functools.cache
def latent_of(shape: ModelShape) -> Latent | None:
    """The latent attention that a shape's source describes, if it has one."""
    if shape.attention != "MLA":
        return None
    result = {
        key: int(match.group(1)) if (match := re.search(rf"\b{key} (\d+)", shape.source)) else 0
        for key in ("q_lora", "kv_lora", "nope", "rope", "v")
    }
    if not result["kv_lora"]:
        return None
    return Latent(result["q_lora"], result["kv_lora"], result["nope"], result["rope"], result["v"])
