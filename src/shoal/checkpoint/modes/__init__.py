"""Ways of saving: how long training waits, and what memory that takes."""
