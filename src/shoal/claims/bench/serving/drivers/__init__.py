"""drivers: one small program an engine, run by the Python of the engine's environment.

They import nothing of Shoal but ``of_shoal.py``, since it is not installed beside the peers.
"""
