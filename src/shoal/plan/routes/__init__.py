"""routes: which nodes a micro-batch visits, and when, on slow and unequal networks.

``network`` says what there is, ``arrange`` puts nodes into stages, ``path`` finds the best
route of one micro-batch, ``conflicts`` those of all, and ``plan`` does one after the other.
"""

__all__: list[str] = []
