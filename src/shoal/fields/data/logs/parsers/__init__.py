"""parsers: ways to make templates of masked lines; start with ``drain.py``."""
