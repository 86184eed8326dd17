"""drivers: programs that run in the environments of peers."""
