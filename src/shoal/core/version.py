"""The version of the package and where it lies, which every room may know."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parents[1]
"""Directory of the package."""
