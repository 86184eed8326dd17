"""Shoal: predict what a large-model job will cost, run it, keep score.

Importing the package loads no torch; rooms are imported when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.train.simple import Trainer

__version__ = "0.1.0"

__all__ = ["Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name == "Trainer":
        from shoal.train.simple import Trainer

        return Trainer
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
