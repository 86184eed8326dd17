"""Shoal: predict what a large-model job will cost, run it, keep score.

Importing the package loads no torch; rooms are imported when they are used.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
