"""methods of variational inequalities; the tables are in ``vi/__init__.py``."""
