"""recurrence: LSTM, GRU, Elman and sLSTM over time, forward and backward.

Start with ``functions`` (what a step computes) and ``reference`` (a loop over time); ``fused``
and ``alternating`` are fast on CPUs, ``triton`` on GPUs.
"""
