"""experiments: one file per claim; the table is ``shoal.claims.CLAIMS``."""
