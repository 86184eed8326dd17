"""Modules that import alike: vectors of nodes, and the nearest. `python similar_modules.py`."""

import tempfile
from pathlib import Path

import numpy as np

import shoal.fields.graph as graphs


def small(folder):
    """The modules of the standard library, joined where one imports another, as an edge list."""
    import re
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.stem for path in root.glob("*.py"))
    place = {name: number for number, name in enumerate(names)}
    lines = []
    for name in names:
        text = (root / f"{name}.py").read_text("utf-8", "replace")
        for other in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE):
            if other in place:
                lines.append(f"{place[name]}\t{place[other]}\n")
    path = Path(folder, "imports.txt")
    path.write_text("# module\timports\n" + "".join(lines))
    return path, names


def main(folder, ask=("tarfile", "smtplib", "ast")):
    path, names = small(folder)
    graph = graphs.read_graph(str(path))
    result = graphs.embed(graph, "fastrp", dim=64, weights=(1, 1, 1), beta=-0.5)
    length = np.linalg.norm(result.vectors, axis=1, keepdims=True)
    unit = result.vectors / np.maximum(length, 1e-12)
    called = [names[one] for one in (range(graph.num_nodes) if graph.ids is None else graph.ids)]
    nearest = {}
    for name in ask:
        if name in called:
            order = np.argsort(-unit @ unit[called.index(name)], kind="stable")
            nearest[name] = [called[one] for one in order[1:4]]
    return nearest


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, others in main(folder).items():
            print(f"{name}: {', '.join(others)}")
