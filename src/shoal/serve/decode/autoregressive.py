"""One token after the other, each seeing those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import ServeError, require
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig


@part
class Autoregressive:
    """Predict the next token from all tokens before it; for all but masked-diffusion models."""

    traits: ClassVar[frozenset[str]] = frozenset({"token_by_token"})

    def factory(self) -> str | None:
        return None

    def check(self, config: ModelConfig) -> None:
        require(
            config.causal,
            "decode",
            "autoregressive",
            expected=f"diffusion for {config.name}, whose tokens see those behind them",
            hint="serve it with --set decode=diffusion",
            error=ServeError,
        )
