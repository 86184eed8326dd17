"""The configuration of a decoder-only transformer; needs no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import ModelError, require
from shoal.cost.configs import planned_only
from shoal.ir.architecture import Architecture
from shoal.ir.shape import ModelShape

Family = Literal["llama", "qwen2", "qwen3", "mixtral", "parallel", "mdlm"]

# Beyond every real model, and small enough that a wrong file cannot exhaust memory
# before its weights were looked at.
_MAX_LAYERS = 4096
_MAX_WIDTH = 2**24


class RopeScaling(Value):
    """How rotary frequencies are stretched beyond the length a model was trained for.

    Names and meaning are those of Hugging Face configurations.

    Args:
        rope_type: linear, dynamic, llama3 or yarn.
        factor: by how much the context grows.
        original_max_position_embeddings: length of the first training (llama3, yarn).
        low_freq_factor: llama3, waves longer than original / this are stretched fully.
        high_freq_factor: llama3, waves shorter than original / this are left alone.
        beta_fast: yarn, rotations above which a dimension is left alone.
        beta_slow: yarn, rotations below which a dimension is stretched fully.
        attention_factor: yarn, scale of queries and keys; derived from ``factor`` if absent.
        mscale: yarn, numerator of that derivation.
        mscale_all_dim: yarn, denominator of that derivation.
        truncate: yarn, round the two borders to whole dimensions.
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: PositiveFloat | None = None
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(
            self.rope_type != "llama3" or self.original_max_position_embeddings is not None,
            "rope_scaling.original_max_position_embeddings",
            None,
            expected="the length of the first training",
            hint="rope_type llama3 needs it",
            error=ModelError,
        )
        require(
            self.high_freq_factor > self.low_freq_factor,
            "rope_scaling.high_freq_factor",
            self.high_freq_factor,
            expected=f"more than low_freq_factor = {self.low_freq_factor}",
            error=ModelError,
        )
        return self


class ModelConfig(Value):
    """Everything that determines a model's arithmetic, and nothing about its execution.

    Args:
        name: display name.
        family: llama, qwen2, qwen3 or mixtral: the Hugging Face class that is written; or
            parallel, whose blocks add attention and feed-forward of the same norm; or mdlm, a
            Llama whose tokens see all others, for masked diffusion.
        vocab_size: rows V of the embedding.
        hidden: width D.
        num_layers: blocks L.
        num_heads: query heads H.
        num_kv_heads: key/value heads K, a divisor of ``num_heads``.
        head_dim: width of one head.
        ffn_hidden: width of the feed-forward layer, or of one expert.
        max_position: longest sequence the model is made for.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched.
        rms_norm_eps: added to the mean square.
        attention_bias: query, key and value projections have a bias.
        output_bias: the attention's output projection has one.
        ffn_bias: the feed-forward projections have one.
        qk_norm: queries and keys are normalised by head.
        tied: the output matrix is the embedding.
        num_experts: experts of a block; 0 for a dense model.
        top_k: experts a token is sent to.
        norm_topk_prob: the weights of the chosen experts add up to 1.
        initializer_range: standard deviation of fresh weights.
        bos_token_id: token that begins a text, if there is one.
        eos_token_id: token or tokens that end it.
        pad_token_id: token that fills a batch.
        mask_token_id: token that stands where a token is to be found; mdlm has one.
        architecture: how the model differs from its family's.
    """

    name: str = "model"
    family: Family = "llama"
    vocab_size: PositiveInt = Field(le=_MAX_WIDTH)
    hidden: PositiveInt = Field(le=_MAX_WIDTH)
    num_layers: PositiveInt = Field(le=_MAX_LAYERS)
    num_heads: PositiveInt = Field(le=_MAX_WIDTH)
    num_kv_heads: PositiveInt = Field(le=_MAX_WIDTH)
    head_dim: PositiveInt = Field(le=_MAX_WIDTH)
    ffn_hidden: PositiveInt = Field(le=_MAX_WIDTH)
    max_position: PositiveInt = 2048
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    num_experts: int = Field(default=0, ge=0, le=_MAX_LAYERS)
    top_k: int = Field(default=0, ge=0)
    norm_topk_prob: bool = True
    initializer_range: PositiveFloat = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    architecture: Architecture = Architecture()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            expected=f"a divisor of num_heads = {self.num_heads}",
            error=ModelError,
        )
        require(
            self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            expected="an even number",
            hint="rotary embeddings turn pairs",
            error=ModelError,
        )
        dynamic = self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic"
        require(
            not dynamic or self.head_dim > 2,
            "head_dim",
            self.head_dim,
            expected="more than 2 with dynamic rope scaling",
            error=ModelError,
        )
        require(
            0 < self.top_k <= self.num_experts if self.num_experts else self.top_k == 0,
            "top_k",
            self.top_k,
            expected=f"1 to num_experts = {self.num_experts}, or 0 in a dense model",
            error=ModelError,
        )
        require(
            (self.family == "mixtral") == (self.num_experts > 0),
            "num_experts",
            self.num_experts,
            expected="experts in the family mixtral and in no other",
            error=ModelError,
        )
        require(
            self.family == "mdlm" or self.qk_norm == (self.family == "qwen3"),
            "qk_norm",
            self.qk_norm,
            expected="true in the family qwen3, either in mdlm, and false in all others",
            error=ModelError,
        )
        self.architecture.moe.check(self.num_experts, self.top_k)
        has_bias = self.attention_bias or self.output_bias or self.ffn_bias
        require(
            not (self.family == "mixtral" and has_bias),
            "attention_bias",
            True,
            expected="no bias in the family mixtral",
            error=ModelError,
        )
        mask = self.mask_token_id
        require(
            mask is None if self.causal else mask is not None and 0 <= mask < self.vocab_size,
            "mask_token_id",
            mask,
            expected=f"a token below vocab_size = {self.vocab_size} in the family mdlm, and none "
            "in any other",
            error=ModelError,
        )
        self.architecture.check(self.num_layers)
        require(
            not self.architecture.name or self.family != "parallel",
            "architecture",
            self.architecture.name,
            expected="a plain model in the family parallel, which has one sub-layer a block",
            error=ModelError,
        )
        ranks = self.architecture.residual.apart
        counts = (self.num_heads, self.num_kv_heads, self.ffn_hidden)
        require(
            all(count % ranks == 0 for count in counts),
            "residual.ranks",
            ranks,
            expected=f"a divisor of num_heads, num_kv_heads and ffn_hidden = {counts}",
            error=ModelError,
        )
        require(
            ranks == 1 or not (self.num_experts or self.ffn_bias or self.output_bias),
            "residual",
            "desync",
            expected="standard or ladder in a model with experts, or with biases behind its sums",
            error=ModelError,
        )
        require(
            not self.architecture.ffn.duo or not (self.num_experts or self.ffn_bias),
            "architecture.ffn",
            self.architecture.ffn.name,
            expected="plain in a model with experts, or with biases in its feed-forward layers",
            error=ModelError,
        )
        return self

    @property
    def causal(self) -> bool:
        """A token sees itself and what came before it, and nothing after it."""
        return self.family != "mdlm"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All tokens that end a text."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    @classmethod
    def from_shape(cls, shape: ModelShape) -> ModelConfig:
        """The configuration of a fresh model of this shape.

        Raises:
            ModelError: the shape has a mechanism that no family here has.
        """
        where = f"shape {shape.name}"
        for problem in _beyond(shape):
            raise ModelError(
                f"{where}: {problem}; it can be planned, but building it needs one of the "
                "families llama, qwen2, qwen3, mixtral"
            )
        family: Family = "llama"
        if shape.family in ("parallel", "mdlm"):
            family = "parallel" if shape.family == "parallel" else "mdlm"
        elif shape.num_experts:
            family = "mixtral"
        elif shape.qk_norm:
            family = "qwen3"
        elif shape.attention_bias:
            family = "qwen2"
        return cls(
            name=shape.name,
            family=family,
            vocab_size=shape.vocab_size,
            hidden=shape.hidden,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            ffn_hidden=(shape.expert_hidden or shape.ffn_hidden)
            if shape.num_experts
            else shape.ffn_hidden,
            max_position=shape.max_position,
            attention_bias=shape.attention_bias,
            qk_norm=shape.qk_norm,
            tied=shape.tied,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            # Tokenizers that are learned for such a model leave its last token free.
            mask_token_id=shape.vocab_size - 1 if family == "mdlm" else None,
            architecture=shape.architecture,
        )

    def shape(self) -> ModelShape:
        """The integers from which the cost follows."""
        return ModelShape(
            name=self.name,
            num_layers=self.num_layers,
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn_hidden=self.ffn_hidden,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_hidden=self.ffn_hidden if self.num_experts else 0,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            tied=self.tied,
            qk_norm=self.qk_norm,
            attention_bias=self.attention_bias,
            attention=_mechanism(self.num_heads, self.num_kv_heads),
            family=self.family,
            architecture=self.architecture,
        )


def _beyond(shape: ModelShape) -> list[str]:
    """What this shape has that no family here can express."""
    problems = []
    if planned_only(shape):
        problems.append(f"it is of type {shape.family}")
    if not shape.gated:
        problems.append("its feed-forward layer is not gated")
    if shape.num_shared_experts or shape.num_dense_layers:
        problems.append("it has shared experts or dense layers among its experts")
    if shape.num_experts and (shape.qk_norm or shape.attention_bias):
        problems.append("it has experts together with QK norm or biases")
    if shape.qk_norm and shape.attention_bias:
        problems.append("it has QK norm together with biases")
    if shape.attention not in ("MHA", "GQA", "MQA"):
        problems.append(f"its attention is {shape.attention}")
    return problems


def _mechanism(heads: int, kv_heads: int) -> str:
    if heads == kv_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"
