"""overlap: communication that travels while the product that needs it, or makes it, is computed.

``tile`` cuts the product of a split linear layer in row tiles; a job asks for it with
``parallel: {tp: 2, overlap: tile}``.
"""

from shoal.ir.job import TILES

__all__ = ["TILES"]
