"""attention: kernels x masks x lengths, and context-parallel methods x masks x ranks.

Correctness comes first: a cell is compared with a float64 reference before it is timed, and
a wrong one is not timed at all. What a kernel or a method cannot do is a row with its reason.

Start reading at ``harness.py``; ``masks`` has the patterns, ``kernels`` and ``context`` run
one row of cells, ``report`` draws the page.

Source: Long-Context Attention Benchmark: From Kernel Efficiency to Distributed Context
Parallelism, 2025.
"""
