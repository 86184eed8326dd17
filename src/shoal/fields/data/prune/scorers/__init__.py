"""scorers: how hard an example is, by random order, by prototypes, or by small networks."""
