"""packed: a log as templates and columns, small and without loss; start with ``container.py``."""
