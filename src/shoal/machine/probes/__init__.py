"""Microbenchmarks, one a file. ``shoal.train.PROBES`` lists them, and those of rooms above."""
