"""Eight nodes on a ring, and nobody in the middle. `python no_server.py`."""

import tempfile
from pathlib import Path

import shoal


def main(folder, clock="wall"):
    return shoal.run(
        kind="gossip",
        directory=Path(folder, "gossip"),
        data="digits",
        partition={"name": "class_k", "k": 4},
        learner={"name": "mlp", "width": 32},
        nodes=8,
        topology="ring_k",
        rounds=10,
        lr=0.1,
        clock=clock,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = main(folder)
    for name in ("accuracy", "loss"):
        if name in report.measured:
            print(f"{name} {report.measured[name]:.3f}")
