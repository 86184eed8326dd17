"""minhash: signatures that estimate how similar sets are, and tables that find similar ones.

Start reading at ``hasher.py``, then ``lsh.py``.
"""

from shoal.fields.data.minhash.hasher import MinHasher
from shoal.fields.data.minhash.lsh import Bands, collision, optimal_bands

__all__ = ["Bands", "MinHasher", "collision", "optimal_bands"]
