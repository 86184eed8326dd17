"""``python -m shoal`` is the command ``shoal``."""

from shoal.app.cli import main

if __name__ == "__main__":
    main()
