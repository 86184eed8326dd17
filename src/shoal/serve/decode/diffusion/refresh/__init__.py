"""refresh: what is computed again, one way a file. The table is the room's ``REFRESHES``."""
