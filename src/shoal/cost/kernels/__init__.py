"""Measured times of kernels on accelerators, and what they say of devices without a table."""
