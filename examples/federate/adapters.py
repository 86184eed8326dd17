"""Adapters of a language model, learned by owners of texts. `python adapters.py [DIRECTORY]`.

Without a directory a small model is trained first, for a few steps. Only adapters travel; every
client reads the model from its own disk.
"""

import sys
import tempfile
from pathlib import Path

import shoal


def base(folder, steps=30):
    """A small model that has read some of the standard library."""
    shoal.train("shoal-1m", steps=steps, seq_len=64, global_batch=8, directory=folder / "base")
    return folder / "base" / "export"


def main(model, folder, rounds=4, clock="wall"):
    text = {"name": "text", "packages": 4, "seq_len": 64, "most": 4000, "tokenizer": str(model)}
    return shoal.run(
        kind="federate",
        directory=folder / "adapters",
        data=text,
        partition="natural",
        learner={"name": "lora", "model": str(model), "r": 4},
        clients=4,
        rounds=rounds,
        steps=5,
        batch=8,
        lr=0.1,
        algorithm="fedavg",
        clock=clock,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else base(folder)
        report = main(model, folder)
        whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    for row in report.details["curve"]:
        print(f"version {row['version']:.0f}: loss {row['loss']:.3f} a token")
    # Four clients, four rounds.
    up = report.measured["up_bytes"] / 16
    print(f"an update has {up / 1e3:.0f} kB, the model {whole / 1e3:.0f} kB")
