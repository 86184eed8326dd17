"""The command ``shoal``, also as ``python -m shoal``."""

import signal
import sys
from pathlib import Path


def main() -> None:
    """Load the command line and run it."""
    # `python -m` puts the working directory first, where a model's files may lie.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [str(Path.cwd())]):
        del sys.path[0]
    # While nothing has begun, Ctrl-C just ends the process; there is no trace to be read.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shoal.app.cli import main as run
    from shoal.core.stopping import catch_signals

    run(catch_signals)


if __name__ == "__main__":
    main()
