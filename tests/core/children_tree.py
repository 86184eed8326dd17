"""A tree of processes: ``python children_tree.py DEPTH`` prints the number of each, and sleeps."""

import subprocess
import sys
import threading
import time
from pathlib import Path

from shoal.core import children


def main() -> None:
    depth = int(sys.argv[1])
    print(f"{__name__ == '__main__'} {sys.argv[1:]}", file=sys.stderr)
    path = str(Path(__file__).parent)
    if depth:
        started: list[subprocess.Popen[str]] = []

        def start() -> None:
            started.append(
                children.start(
                    "children_tree",
                    str(depth - 1),
                    env=children.environment({"PYTHONPATH": path}),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

        # The thread that asks for a child ends at once; the child must not.
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        below = started[0].stdout.readline().split()
        print(started[0].pid, *below, flush=True)
    else:
        print(flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
