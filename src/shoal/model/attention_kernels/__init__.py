"""attention_kernels: softmax attention under any typed mask, one way a file.

The table is the room's ``ATTENTION_KERNELS``. The parts declare what they can do without
torch; ``prepare`` brings what depends on the mask alone into the form that a kernel wants,
so that it is timed and counted apart from attention itself.
"""
