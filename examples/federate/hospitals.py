"""Three hospitals, one table each. `python hospitals.py`, or your own: `python hospitals.py TABLE LABEL OWNER`."""

import csv
import sys
import tempfile
from pathlib import Path

from sklearn.datasets import load_breast_cancer

import shoal


def write_table(path):
    """Measurements of cell nuclei; hospitals see tumours of different sizes."""
    data = load_breast_cancer()
    names = [name.replace(" ", "_") for name in data.feature_names]
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*names, "diagnosis", "hospital"])
        for x, y in zip(data.data, data.target):
            owner = "north" if x[0] < 12 else "south" if x[0] < 15 else "west"
            rows.writerow([*x, data.target_names[y], owner])


def main(path, label, owner, clock="wall"):
    table = {"name": "file", "path": str(path), "label": label, "owner": owner}
    return shoal.run(
        kind="federate",
        directory=Path(path).with_suffix(".run"),
        data=table,
        partition="natural",
        learner="linear",
        clients=3,
        rounds=6,
        steps=10,
        lr=0.01,
        clock=clock,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        words = sys.argv[1:4]
        if not words:
            words = [Path(folder, "tumours.csv"), "diagnosis", "hospital"]
            write_table(words[0])
        report = main(*words)
    print(f"accuracy {report.measured['accuracy']:.3f}")
    for client in report.details["clients"]:
        print(f"{client['name']}: {client['samples']} rows, accuracy {client['accuracy']:.3f}")
