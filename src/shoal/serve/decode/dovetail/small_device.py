"""What lies on the small device beside the host: the drafter, and the target's first layers.

Source: Zhang et al., Dovetail, 2025, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, require
from shoal.core.parts import table
from shoal.ir import KVPart, ServeJob
from shoal.kernel.kv.bfp import BfpKVFormat
from shoal.model.architecture import plain
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer
from shoal.plan.serving.small_device import tree_room
from shoal.serve.cache.paged import token_bytes
from shoal.serve.decode.dovetail.fast import fits
from shoal.serve.decode.dovetail.shared_layers import layer_numbers
from shoal.serve.decode.dovetail.taped import kept_places

if TYPE_CHECKING:
    from shoal.serve.decode.dovetail.part import DovetailSpeculative

_WHERE = "speculative.dovetail"


class SmallDeviceContents(NamedTuple):
    """What lies on the small device.

    Args:
        fast: the drafter is computed by the kernels of inference.
        target_layers: of the target.
    """

    nbytes: int
    fast: bool
    target_layers: int


def placed(
    part: DovetailSpeculative,
    job: ServeJob,
    model: Transformer,
    layers: int,
    state: Mapping[str, Tensor],
) -> SmallDeviceContents:
    """What the options of a part come to for a target.

    Raises:
        ConfigError: that does not fit in ``memory_cap``, or cannot be here.
        ModelError: the target's layers cannot be computed elsewhere.
    """
    target, limit = model.config, job.max_position or model.config.max_position
    dtype, itemsize = model.weight.dtype, model.weight.element_size()
    place = 2 * layers * target.num_kv_heads * target.head_dim
    longest = limit + tree_room(part.depth, part.breadth)
    words, net = target.vocab_size * target.hidden, sum(one.numel() for one in state.values())
    # Kernels of inference want the head in an order of their own, and the gate by tokens: the
    # embedding itself is one copy more where layers of the target read it.
    nbytes = itemsize * (net + (1 if target.tied else 2) * words + place * longest)
    copies = 4 if part.target_layers else 3
    quick = itemsize * (net + copies * words + place * kept_places(job, longest))
    cap = part.memory_cap
    if cap and nbytes > cap:
        raise ConfigError(
            f"{_WHERE}.memory_cap = {cap}: the drafter with {layers} layers and the copies of "
            f"embedding and head takes {nbytes} bytes; give at least that, or train a drafter "
            "with fewer layers"
        )
    of_layer = _layer_bytes(job, target, dtype) if part.target_layers else 0
    least = part.target_layers if isinstance(part.target_layers, int) else 0
    fast = fits(target, dtype, torch.device(part.draft_device)) and not job.exact
    fast = fast and (not cap or quick + least * of_layer <= cap)
    if part.weights != "plain" and not fast:
        raise ConfigError(
            f"{_WHERE}.weights = {part.weights}: the drafter is computed without the kernels of "
            "inference here (another device, precision or CPU, exact, or a memory_cap under "
            f"{quick + least * of_layer} bytes); give weights: plain"
        )
    drafter = quick if fast else nbytes
    count = _layers(part.target_layers, target, cap, drafter, of_layer)
    return SmallDeviceContents(drafter + count * of_layer, fast, count)


def _layers(
    wanted: int | Literal["auto"], target: ModelConfig, cap: int, drafter: int, of_layer: int
) -> int:
    """How many layers of the target lie beside the drafter."""
    most = target.num_layers - 1
    room = (cap - drafter) // of_layer if cap and of_layer else most
    if wanted == "auto":
        return min(most, room)
    require(
        wanted <= most,
        f"{_WHERE}.target_layers",
        wanted,
        expected=f"at most {most}: model {target.name} has {target.num_layers} layers, and the "
        "host keeps the last",
        hint="a model that fits on the device whole needs no host",
    )
    if wanted > room:
        raise ConfigError(
            f"{_WHERE}.target_layers = {wanted}: beside the drafter, which takes {drafter} bytes, "
            f"memory_cap = {cap} has room for {room} layers of {of_layer} bytes with their cache; "
            f"give target_layers: {room}, or a memory_cap of {drafter + wanted * of_layer}"
        )
    return wanted


def _layer_bytes(job: ServeJob, target: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a layer of the target with its cache.

    Raises:
        ConfigError: the job wants what such layers do not do.
        ModelError: the model is of an architecture that cannot be cut there.
    """
    where = f"{_WHERE}.target_layers"
    plain(target, where)
    form = table("kv_format").build(job.kv_format, where="kv_format")
    for what, wanted, good in (
        ("weights", job.weights, job.weights == "plain"),
        ("host_tokens", job.host_tokens, not job.host_tokens),
        (
            "kv_format",
            str(job.kv_format),
            not isinstance(form, BfpKVFormat) or form.ksort == "none",
        ),
    ):
        require(
            good,
            what,
            wanted,
            expected=f"with {where}: weights = plain, preempt = recompute without host_tokens, and "
            "a kv_format that does not sort channels",
            hint="leave it out, or the layers on the host",
        )
    part: KVPart = table("kv").build(job.kv, where="kv")
    assert job.kv_tokens is not None
    kv = part.build(job.kv_tokens)
    one = target.model_copy(update={"num_layers": 1})
    places = kv.num_blocks * kv.block_size
    return layer_numbers(target) * dtype.itemsize + places * token_bytes(one, dtype, form)
