"""Accelerators: what a training step costs on GPUs, kernel by kernel."""
