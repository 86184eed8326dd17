"""What families, gates and quantizers promise.

A family is the correspondence between one Hugging Face architecture and ours. It keeps no
state and needs no torch. It is called when a directory is read or written, and when fresh
weights are drawn: their streams are keyed by the stored names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from shoal.model.config import ModelConfig
from shoal.model.families.common import Names

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat
    from shoal.kernel.protocols import PackedMatrix
    from shoal.model.quantize.inputs import Inputs
    from shoal.model.routing import RoutingRequest, RoutingResult


@runtime_checkable
class Family(Protocol):
    """One architecture of Hugging Face.

    Reading a written directory gives the same configuration, except its name.
    """

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes; ``where`` names it in errors.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """

    def names(self, config: ModelConfig) -> Names:
        """Our parameter -> the stored tensors that make it up, in memory order."""


class Gate(Protocol):
    """A part of kind ``gate``: which experts a token goes to, and with what weights.

    Keeps no state: the router's parameters are the layer's.

    Attributes:
        kept: names of parameters without a gradient.
        decodes: where a token goes does not depend on later ones.
    """

    kept: ClassVar[frozenset[str]]
    decodes: ClassVar[bool]

    def shapes(self, hidden: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """Parameters of the router by their names in the layer, ``router.weight`` last."""

    def check(self, top_k: int) -> None:
        """Refuse a number of experts that this gate does not send a token to.

        Raises:
            ModelError: names the number.
        """

    def scores(self, logits_NR: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Scores [N, E] of all experts.

        Args:
            logits_NR: tokens times the router's matrix; fp32, or fp64 for fp64 weights.
            own: the router's other parameters, by name.
        """

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        """Experts and weights of each token, by its scores."""

    def settle(self, own: Mapping[str, Tensor], load_E: Tensor) -> None:
        """A step has ended in which so many tokens chose each expert; may change ``own``."""


class Quantizer(Protocol):
    """A part of kind ``quantizer``: how the codes of one matrix are chosen.

    Attributes:
        calibrated: it uses the inputs of layers, so it needs calibration text.
    """

    calibrated: ClassVar[bool]

    def rescale(self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs) -> Tensor | None:
        """Factors [K] for the columns of a matrix, whose inputs are then divided by them.

        Asked before :meth:`quantize`, where the division can go into what makes the inputs.

        Returns:
            None: as they are.
        """

    def quantize(
        self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs | None = None
    ) -> PackedMatrix:
        """The matrix in a format.

        Args:
            weight_NK: any floating-point type.
            fmt: the format.
            inputs: what the layer is given; None where the part is not calibrated.

        Raises:
            KernelError: the format refuses the matrix.
            ModelError: inputs are missing.
        """
