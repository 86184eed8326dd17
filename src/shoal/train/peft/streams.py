"""Parallel streams on a trained model that stands still: prefixes and aggregator are trained.

What comes out is a ParScale model around the same backbone: with one stream, which a request may
ask for, it is the base to the bit.

Source: Chen et al., Parallel Scaling Law for Language Models, 2025, dynamic parallel scaling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir.architecture import Streams
from shoal.train.peft.prompts import PromptMethod

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class ParallelStreams(PromptMethod):
    """Prefixes for parallel streams and the layer that aggregates them; changes the initial output.

    Args:
        num: streams P, at least 2.
        prefix: virtual tokens of each stream in every layer.
        smoothing: label smoothing of the aggregation: share of the uniform mean of the streams.
        fewer: every other step uses a random smaller number of streams, so that requests may ask
            for fewer; otherwise all steps use all streams.
    """

    num: Annotated[int, Ge(2), Le(64)] = 4
    prefix: Annotated[int, Ge(1)] = 48
    smoothing: Annotated[float, Ge(0), Le(1)] = 0.1
    fewer: bool = True
    name: ClassVar[str] = "streams"
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pass

    @property
    def streams(self) -> Streams:
        """The option of the model that comes out."""
        return Streams(num=self.num, prefix=self.prefix, smoothing=self.smoothing)

    def parameters(self, shape: ModelShape) -> float:
        prefixes = 2 * shape.num_layers * self.prefix * shape.num_kv_heads * shape.head_dim
        joined = self.num * shape.hidden * (shape.hidden + 1) + shape.hidden + self.num
        return float(self.num * prefixes + joined)

    def shape(self, base: ModelShape) -> ModelShape:
        """Of the model that is computed: every stream is."""
        architecture = base.architecture.model_copy(update={"streams": self.streams})
        return base.model_copy(update={"architecture": architecture})

    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        """Give the model streams, until the method is removed.

        Raises:
            ModelError: it is not a plain model of this library.
        """
        from shoal.train.peft.run.streams import OwnStreams

        handle.modules[""] = OwnStreams(handle, self.streams, seed, fewer=self.fewer)
