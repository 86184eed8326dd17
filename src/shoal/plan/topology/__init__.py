"""topology: which device is which rank, where clusters of different networks train together.

``clusters`` says what there is, ``groups`` who of a split talks over what, ``speed`` cuts the
layers among stages of different speeds, ``iteration`` times a step, and ``order`` searches
among the orders of ``ways``.
"""

__all__: list[str] = []
