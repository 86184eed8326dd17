"""autotp: traces models, and runs them split by a plan that was read off the trace.

``trace`` makes the graph that :mod:`shoal.plan.autotp` plans, ``split`` runs it on ranks, and
``modules`` does the same for the parts of a model that cannot be traced as a whole.
"""

__all__: list[str] = []
