"""unmask: which guesses are kept, one way a file. The table is the room's ``UNMASKS``."""
