"""anomalies: which sessions or windows of events are unusual; start with ``protocols.py``."""
