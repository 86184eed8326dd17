"""Published runs, replayed: what others measured beside what Shoal would have said."""
