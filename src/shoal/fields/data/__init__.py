"""data: rooms of jobs that work on tables and vectors, such as ``cluster``."""
