"""The shape of a model: integers from which every count follows."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.ir.architecture import Architecture


class ModelShape(Value):
    """A decoder-only transformer in numbers.

    Args:
        name: display name.
        num_layers: blocks.
        hidden: width D.
        num_heads: query heads H.
        num_kv_heads: key/value heads, a divisor of ``num_heads``.
        head_dim: width of one head.
        ffn_hidden: width of the dense feed-forward layer.
        gated: three feed-forward matrices (SwiGLU) instead of two.
        num_experts: experts of a mixture layer; 0 for a dense model.
        num_shared_experts: experts that see every token.
        top_k: experts a token is sent to.
        expert_hidden: width of one expert's feed-forward layer.
        num_dense_layers: blocks without experts, in a mixture model.
        vocab_size: rows of the embedding.
        max_position: maximum sequence length of the model.
        tied: output matrix is the embedding.
        qk_norm: queries and keys are normalised by head.
        attention_bias: query, key and value projections have a bias.
        attention: MHA, GQA or MQA; other mechanisms are counted as GQA, approximately.
        family: family name, for display.
        source: where the numbers come from.
        stored: dtype of the matrices in the published files: bf16, or fp32 if they are not all
            exact in bf16.
        weights: format in which the published files hold the matrices of linear layers (fp8 ...);
            plain for floating-point numbers of 16 bits and more.
        rope_base: base of the rotary positions' frequencies (rope_theta); None where not known.
        architecture: how it differs from its family's models.
    """

    # Not a field: a copy with other numbers computes its own.
    __slots__ = ("_hash",)

    name: str
    num_layers: PositiveInt
    hidden: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn_hidden: PositiveInt
    gated: bool = True
    num_experts: int = 0
    num_shared_experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    num_dense_layers: int = 0
    vocab_size: PositiveInt
    max_position: PositiveInt = 2048
    tied: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    attention: str = "GQA"
    family: str = ""
    source: str = ""
    stored: Literal["fp32", "bf16"] = "fp32"
    weights: str = "plain"
    rope_base: float | None = None
    architecture: Architecture = Architecture()

    def __hash__(self) -> int:
        """Computed once: counts that follow from a shape are remembered under it."""
        try:
            known: int = object.__getattribute__(self, "_hash")
        except AttributeError:
            known = hash(tuple(self.__dict__.values()))
            object.__setattr__(self, "_hash", known)
        return known

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: {self.num_heads} heads cannot share {self.num_kv_heads} "
                "key/value heads; the second must divide the first"
            )
        if self.num_experts and not 0 < self.top_k <= self.num_experts:
            raise ConfigError(
                f"{self.name}: top_k = {self.top_k} of {self.num_experts} experts; "
                "give 1 to the number of experts"
            )
        self.architecture.check(self.num_layers)
        return self
