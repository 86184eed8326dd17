"""Microbenchmarks, one a file. ``shoal.machine.PROBES`` lists them."""
