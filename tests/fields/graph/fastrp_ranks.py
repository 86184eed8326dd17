"""What a rank of the tests of FastRP does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.fields.graph import CSRGraph
from shoal.fields.graph.embedding.fastrp.ranks import fit_share


def embed_rows(comm, graph, into):
    rows, vectors = fit_share(CSRGraph.open(Path(graph)), comm, dim=48, beta=0.3)
    np.save(Path(into) / f"{comm.rank}.npy", vectors)
    return [rows.start, rows.stop]
