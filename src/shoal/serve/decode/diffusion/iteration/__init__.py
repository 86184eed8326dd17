"""iteration: what is seen at a mask, one way a file. The table is the room's ``ITERATIONS``."""
