"""autotp: a tensor-parallel plan for any traced model, from its graph and not from its names.

``graph`` is what a trace looks like without torch, ``flow`` says how a split travels through
each operator, ``plan`` applies the two rules and says what came of them.
"""

__all__: list[str] = []
