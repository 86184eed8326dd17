"""What goes wrong with data that are prepared."""

from __future__ import annotations

from shoal.core.errors import ConfigError


class PrepareError(ConfigError):
    """A step, or data, that cannot be used like that."""


class BudgetError(PrepareError):
    """A release that the privacy budget does not allow."""
