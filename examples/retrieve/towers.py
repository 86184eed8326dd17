"""Train large towers, shrink the query side, and search: `python examples/retrieve/towers.py`."""

import tempfile
from pathlib import Path

import numpy as np

from shoal.core.parts import table
from shoal.fields.retrieve.towers import TowerPair, error_bounds, read_pairs, unchanged
from shoal.fields.retrieve.towers.protocols import TowerTask

pairs = read_pairs("docstrings:asyncio")
task = TowerTask(large="2x128", small="1x64", vocab=600, batch=32, epochs=4)
method = table("tower_training").build({"name": "two_stage", "epochs": 20})
pair = method.train(task, pairs, lambda done, text: None)

with tempfile.TemporaryDirectory() as place:
    pair.save(Path(place) / "towers")
    pair = TowerPair.load(Path(place) / "towers")

documents = pair.encode_document(pairs.documents)
queries = pair.encode_query(pairs.queries)
for at in range(3):
    best = int(np.argmax(documents @ queries[at]))
    print(f"{pairs.queries[at][:50]} -> {pairs.documents[best][:50]}")

teacher = pair.teacher.encode(pairs.queries)
print(f"mean bound of a score's change: {error_bounds(queries, teacher).mean():.3f}")
print(f"surely the same best document: {unchanged(queries, teacher, documents, 1).mean():.0%}")
