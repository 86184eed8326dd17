"""Optional packages, imported where they are used, with the extra to install when absent."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.core.errors import MissingExtraError

__all__ = ["import_extra"]


def import_extra(module: str, *, extra: str, purpose: str) -> Any:
    """Import ``module`` of an optional package.

    Args:
        module: dotted name, such as ``ray``.
        extra: the extra of ``shoal-ml`` that brings it.
        purpose: what it is needed for, as the subject of a sentence.

    Raises:
        MissingExtraError: the package is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        package = module.partition(".")[0]
        if (cause.name or "").partition(".")[0] != package:
            raise  # the package is there, but broken: that is not for us to hide
        raise MissingExtraError(package, extra, purpose) from None
