"""hdp: hybrid data parallelism. Every sequence of a batch on as many ranks as a plan gives it.

``slices`` says which tokens are whose, ``attention`` reaches the rest of a sequence, ``runtime``
goes through a rank's micro-steps.
"""
