"""Modules that are imported by the same others: a community. `python module_communities.py`."""

import re
import sysconfig
import tempfile
from pathlib import Path

from shoal.fields.graph import CSRGraph
from shoal.fields.graph.communities import SignatureGraph


def imports():
    """The modules of the standard library; an edge leads from a module to one that it imports."""
    import numpy as np

    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.stem for path in root.glob("*.py"))
    place = {name: number for number, name in enumerate(names)}
    pairs = []
    for name in names:
        text = (root / f"{name}.py").read_text("utf-8", "replace")
        for other in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE):
            if other in place:
                pairs.append((place[name], place[other]))
    source, target = np.array(pairs).T
    return CSRGraph.from_edges(source, target, ids=np.array(names), directed=True)


def main(folder, seeds=("socket", "selectors"), size=10):
    graph = SignatureGraph.from_edges(imports(), side="in", threshold=0.05, least_degree=2)
    community = SignatureGraph.open(graph.save(Path(folder, "signatures"))).expand(
        seeds, size, method="pagerank"
    )
    view = graph.view(community.members)
    return dict(zip(view.names.tolist(), view.groups.tolist(), strict=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, group in main(folder).items():
            print(f"{group}: {name}")
