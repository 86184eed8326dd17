"""matmul_planes: exact products of bipolar integers of 1 to 8 bits, given as bit planes.

Bit i of a code means +2^i where it is 1 and -2^i where it is 0, so a number of b bits is an odd
integer from -(2^b - 1) to 2^b - 1, and a product of numbers of w and a bits is w x a products of
one bit, all alike. Start reading at ``layout.py``, then ``base.py`` and ``engines.py``.

Source: Ma et al., Efficient Arbitrary Precision Acceleration for Large Language Models on GPU
Tensor Cores, 2024.
"""
