"""Which experts a token goes to, and how training keeps them busy alike."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from shoal.core.config import Value
from shoal.core.errors import ModelError, require
from shoal.core.parts import Choice, table

# A capacity of 6.000000000000001 tokens is meant to be 6.
_ROUNDING = 1e-9


class Routing(Value):
    """The router of a mixture of experts.

    Only ``gate`` says what a trained model computes. The rest is of training: in inference no
    token is dropped, since what a token gets must not depend on who is served beside it.

    Args:
        gate: how experts are selected from router scores.
        capacity_factor: maximum tokens of an expert, as a multiple of the mean; tokens with lower
            scores are dropped. None drops no token.
        scope: among which tokens capacity counts: those of a ``full-sequence``, wherever they are,
            or a ``sub-sequence``, all that a rank has at once, which needs no communication; what
            is dropped then depends on split and micro-batch.
        aux_loss: coefficient of the loss of unequal loads, E times the sum over experts of the
            share of choices times the mean score, of every sequence; 1 where loads are equal.
        z_loss: coefficient of the mean square of the router's log-sum-exp.
    """

    gate: Choice = Choice(name="softmax")
    capacity_factor: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    scope: Literal["full-sequence", "sub-sequence"] = "full-sequence"
    aux_loss: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)
    z_loss: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _known(self) -> Self:
        table("gate").build(self.gate, where="moe.gate")
        return self

    def check(self, num_experts: int, top_k: int) -> None:
        """Refuse what no model of so many experts, and so many a token, can have.

        Raises:
            ModelError: names the option.
        """
        require(
            num_experts > 0 or self == Routing(),
            "architecture.moe",
            self.gate.name,
            expected="nothing in a model without experts",
            error=ModelError,
        )
        gate = table("gate").build(self.gate)
        if num_experts:
            gate.check(top_k)
        require(
            gate.decodes or not self.aux_loss,
            "architecture.moe.aux_loss",
            self.aux_loss,
            expected=f"0 with gate {self.gate.name}, whose loads are equal",
            error=ModelError,
        )

    def capacity(self, tokens: int, top_k: int, num_experts: int) -> int:
        """Tokens that an expert takes of ``tokens``, each of which makes ``top_k`` choices."""
        factor = 1.0 if self.capacity_factor is None else self.capacity_factor
        return max(1, math.ceil(factor * top_k * tokens / num_experts - _ROUNDING))
