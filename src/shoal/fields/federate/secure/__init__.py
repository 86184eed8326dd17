"""secure: the server learns the sum of updates, and no update. Start at ``rounds.py``."""
