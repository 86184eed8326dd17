"""An island: a process that trains one network from its own directory and talks to nobody.

It reads its task from standard input, and prints the steps that it has made. Once it has begun, a
socket that it opens, or a file in the directory of another island, ends it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.fields.federate.ddm.protocols import NetworkTask
from shoal.fields.federate.protocols import FederationError


def isolate(run: Path, own: Path) -> None:
    """Refuse sockets, and files of the run that are not in the island's own directory."""
    inside, mine = f"{run.resolve()}/", f"{own.resolve()}/"

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.__new__", "socket.connect", "socket.bind"):
            raise FederationError(f"{own.name}: an island opened a socket ({event})")
        if event == "open" and isinstance(arguments[0], str):
            path = f"{arguments[0]}/"
            if path.startswith(inside) and not path.startswith(mine):
                raise FederationError(
                    f"{own.name}: an island opened {arguments[0]}, which is not its own"
                )

    sys.addaudithook(refuse)


def main() -> None:
    """Train to the end."""
    import torch

    from shoal.fields.federate.ddm.training import NetworkTraining, read_shard, train_to_the_end

    torch.set_num_threads(1)
    given = json.loads(sys.stdin.readline())
    task, run = NetworkTask.model_validate(given["task"]), Path(given["run"]).resolve()
    directory = run / task.folder
    isolate(run, directory)

    def tick(step: int, loss: float) -> None:
        print(json.dumps({"step": step, "loss": loss}), flush=True)

    train_to_the_end(directory, NetworkTraining(task, read_shard(directory)), tick)


if __name__ == "__main__":
    try:
        main()
    except ShoalError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
