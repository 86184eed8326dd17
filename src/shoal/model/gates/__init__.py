"""Gates: how the scores of a router become experts and weights.

Each is a part of kind ``gate``, which :class:`~shoal.model.feedforward.Experts` asks. What all of
them do the same, capacity, balance losses and counting, is in :mod:`shoal.model.routing`.
"""
