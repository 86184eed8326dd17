"""overlap: communication that travels while the product that needs it, or makes it, is computed.

``tile`` cuts the product of a split linear layer in row tiles; a job asks for it with
``parallel: {tp: 2, overlap: tile}``.
"""

__all__ = ["TILES"]

TILES = 4
"""Row tiles of one rank's share of the tokens; N ranks cut a product in N times as many."""
