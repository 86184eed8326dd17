"""Serving a model that is larger than its device: blocks come when they are needed.

See :mod:`shoal.memory.streaming.superpipeline`. The blocks compute with the library's operators:
kernels that pack weights, or keep their addresses, cannot work with weights that come and go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.core.sizes import Size

if TYPE_CHECKING:
    from shoal.memory.streaming.superpipeline import SuperpipelineModel as Wrapped
    from shoal.model.transformer import Transformer


@part
class SuperpipelineMemory:
    """Keep a window of k blocks on the device; the other blocks are loaded as the pass proceeds.

    Args:
        k: blocks on the device; auto takes the smallest window that meets ``goal``, after one
            measured step.
        k_prime: blocks that are replaced at once; half of k if not given.
        device_budget: largest number of bytes of weights on the device; no limit if not given.
        goal: with auto, largest step time as a multiple of that with all blocks on the device.
        bytes_per_s: byte/s of an emulated link; None to copy at the speed of the machine.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"moves_weights"})
    k: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    k_prime: Annotated[int, Ge(1)] | None = None
    device_budget: Size | None = None
    goal: Annotated[float, Ge(1)] = 1.1
    bytes_per_s: Annotated[float, Gt(0)] | None = None

    def apply(self, model: Transformer) -> Wrapped:
        """See :class:`~shoal.serve.cache.weights.MemoryPart`.

        Raises:
            ConfigError: more blocks than the model has.
            ModelError: the model has no chain of blocks with weights of their own.
            PlanError: the budget is too small; says what is needed.
        """
        from shoal.memory.streaming.superpipeline import wrap
        from shoal.memory.tiers.mover import EmulatedLink

        return wrap(
            model,
            self.k,
            self.k_prime,
            device=str(model.embed.weight.device),
            device_budget=self.device_budget,
            goal=self.goal,
            link=None if self.bytes_per_s is None else EmulatedLink(self.bytes_per_s),
            methods=("forward", "flat"),
        )
