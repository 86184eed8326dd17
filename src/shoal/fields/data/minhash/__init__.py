"""minhash: signatures that estimate how similar sets are, and tables that find similar ones.

Start reading at ``hasher.py``, then ``lsh.py``.
"""

from shoal.fields.data.minhash.hasher import MinHasher
from shoal.fields.data.minhash.lsh import Bands, bands_reaching, collision, optimal_bands

__all__ = ["Bands", "MinHasher", "bands_reaching", "collision", "optimal_bands"]
