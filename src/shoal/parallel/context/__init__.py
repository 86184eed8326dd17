"""context: attention over sequences that several ranks share, one way a file.

The table is the room's ``CONTEXTS``. ``run`` has what computes, which needs torch.
"""
