"""packing: how documents fill sequences, one way a file. The table is the room's ``PACKINGS``."""
